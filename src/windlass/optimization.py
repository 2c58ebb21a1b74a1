"""Names that scripts import from here: optimizers and schedules (`windlass.optim`), loaded when they are asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
