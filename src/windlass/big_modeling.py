"""Re-exports of the old library: models that are larger than one device (`windlass.compat.big_models.big_model`)."""

from windlass.compat.big_models.attach_hooks import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from windlass.compat.big_models.auto_device_map import infer_auto_device_map as infer_auto_device_map
from windlass.compat.big_models.big_model import cpu_offload as cpu_offload
from windlass.compat.big_models.big_model import cpu_offload_with_hook as cpu_offload_with_hook
from windlass.compat.big_models.big_model import disk_offload as disk_offload
from windlass.compat.big_models.big_model import dispatch_model as dispatch_model
from windlass.compat.big_models.big_model import init_empty_weights as init_empty_weights
from windlass.compat.big_models.big_model import init_on_device as init_on_device
from windlass.compat.big_models.big_model import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from windlass.compat.big_models.checkpoint_loading import load_checkpoint_in_model as load_checkpoint_in_model
