"""Names that scripts import from here: callbacks and what they see, loaded when they are first asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
