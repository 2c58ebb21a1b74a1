"""What a model is fed with. Scripts import collators from here; they are loaded when they are first asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
