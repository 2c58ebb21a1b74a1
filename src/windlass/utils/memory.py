"""Names that scripts import from here: memory of devices."""

from typing import Any

from windlass.core.lazy import loader_of
from windlass.utils.homes import names_in

_NAMES = names_in("windlass.accelerator.device_cache")
_load = loader_of(__name__, _NAMES)
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return _load(name)
