"""Re-exports of the old library: models that are larger than one device."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
