"""Names that scripts import from here: the search for values that are not finite, loaded when it is asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
