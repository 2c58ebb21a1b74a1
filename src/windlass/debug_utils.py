"""Names that scripts import from here: the search for values that are not finite, loaded when it is asked for."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.config.enums": ("DebugOption",),
    "windlass.transforms.overflow_watch": ("DebugUnderflowOverflow",),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
