"""Names that scripts import from here: the arguments of a run whose evaluations generate text."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
