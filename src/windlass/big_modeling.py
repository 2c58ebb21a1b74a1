"""Names that scripts import from here: models that are larger than one device (`windlass.compat.big_model`)."""

from windlass.compat.auto_device_map import infer_auto_device_map
from windlass.compat.big_model import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from windlass.compat.checkpoint_loading import load_checkpoint_in_model
from windlass.compat.layerwise_casting import attach_layerwise_casting_hooks
from windlass.transforms.meta import init_empty_weights, init_on_device

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
