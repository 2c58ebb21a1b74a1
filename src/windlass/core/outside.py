"""The one place where the core asks for something in `compat/`: by name, when it is needed, and only for these.

Without `compat/` everything else works: what is found here has a substitute, and what is loaded a clear error.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from windlass.core.errors import MissingDependencyError

# What the core asks for -> the module that has it. Nothing else in the core names a module of `compat/`.
OUTSIDE = {
    "checkpoints of transformers": "windlass.compat.readers.transformers_checkpoint",
    "checkpoints of accelerate": "windlass.compat.readers.accelerate_state",
    "files of torch.save": "windlass.compat.readers.torch_file",
    "folders of DeepSpeed": "windlass.compat.readers.deepspeed_folder",
    "plugins of FSDP": "windlass.compat.plugin_fsdp",
    "plugins of DeepSpeed": "windlass.compat.plugin_engines",
    "options of float8": "windlass.compat.plugins",
    "refused names": "windlass.compat.refused_names",
    "the state singletons": "windlass.compat.state",
    "models without data": "windlass.compat.big_models.big_model",
    "sizes of modules": "windlass.compat.big_models.device_memory",
    "configurations of other programs": "windlass.compat.conversion.programs",
    "imports of other libraries": "windlass.compat.import_hook",
}


def find_outside(what: str) -> ModuleType | None:
    """Return the module for `what`, a key of `OUTSIDE`; None if `compat/` is not installed."""
    if importlib.util.find_spec("windlass.compat") is None:
        return None
    return importlib.import_module(OUTSIDE[what])


def load_outside(what: str) -> ModuleType:
    """Return the module for `what`, a key of `OUTSIDE`. Raises MissingDependencyError if `compat/` is not installed."""
    found = find_outside(what)
    if found is None:
        raise MissingDependencyError(
            f"{what} need {OUTSIDE[what]}, and this installation has no windlass.compat; install windlass as a whole"
        )
    return found
