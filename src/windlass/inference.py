"""Names that scripts import from here: pipelines of several devices. They are refused, each with its reason."""

from windlass.compat.refused_names import WHY
from windlass.core.lazy import loader_of

__getattr__ = loader_of(__name__, {}, WHY)
