"""Names that tests of scripts import from here (`windlass.compat.testing_tools`), loaded when they are asked for."""

from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
