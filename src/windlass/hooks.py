"""Re-exports of the old library: hooks around a module's forward (`windlass.compat`)."""

from windlass.compat.big_models.attach_hooks import LayerwiseCastingHook as LayerwiseCastingHook
from windlass.compat.big_models.attach_hooks import attach_align_device_hook as attach_align_device_hook
from windlass.compat.big_models.attach_hooks import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from windlass.compat.big_models.attach_hooks import (
    attach_execution_device_hook as attach_execution_device_hook,
)
from windlass.compat.big_models.model_hooks import ModelHook as ModelHook
from windlass.compat.big_models.model_hooks import SequentialHook as SequentialHook
from windlass.compat.big_models.model_hooks import add_hook_to_module as add_hook_to_module
from windlass.compat.big_models.model_hooks import remove_hook_from_module as remove_hook_from_module
from windlass.compat.big_models.model_hooks import remove_hook_from_submodules as remove_hook_from_submodules
from windlass.compat.big_models.module_tensors import CpuOffload as CpuOffload
from windlass.compat.big_models.module_tensors import UserCpuOffloadHook as UserCpuOffloadHook
from windlass.compat.big_models.offloaded import AlignDevicesHook as AlignDevicesHook
