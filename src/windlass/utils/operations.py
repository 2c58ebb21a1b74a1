"""Re-exports of the old library: operations on nests of tensors."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
