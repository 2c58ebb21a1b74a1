"""Names that scripts import from here: what runs before and after a module's forward (`windlass.transforms`)."""

from windlass.compat.attach_hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from windlass.compat.layerwise_casting import LayerwiseCastingHook
from windlass.compat.moving import CpuOffload, UserCpuOffloadHook
from windlass.transforms.model_hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from windlass.transforms.offload import AlignDevicesHook

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
