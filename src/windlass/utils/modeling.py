"""Names that scripts import from here: models that are larger than one device."""

from typing import Any

from windlass.core.lazy import loader_of
from windlass.utils.homes import names_in

_NAMES = names_in(
    "windlass.compat.checkpoint_loading", "windlass.compat.auto_device_map", "windlass.compat.device_map",
    "windlass.compat.device_memory", "windlass.transforms.module_sizes", "windlass.transforms.module_tensors",
    "windlass.transforms.offload",
)  # fmt: skip
_load = loader_of(__name__, _NAMES)
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return _load(name)
