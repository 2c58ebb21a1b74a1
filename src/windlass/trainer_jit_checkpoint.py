"""Names that scripts import from here: saving when a scheduler asks a job to leave. They are refused, with reasons."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {"windlass.core.events": ("TrainerCallback",)}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
