"""`Trainer`, and the names that scripts import with it. Each is loaded at its first use."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
