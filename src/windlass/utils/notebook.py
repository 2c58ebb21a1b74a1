"""Names that scripts import from here: progress in notebooks."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
