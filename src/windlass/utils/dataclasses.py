"""Re-exports of the old library: configuration objects and enums."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
