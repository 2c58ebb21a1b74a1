"""The names of `windlass.utils`, with `windlass.utils.logging.set_verbosity(level)` and others, loaded on first use.

A name of the old library that Windlass does not have raises an error with the reason.
"""

from windlass.core import logs as logging  # noqa: F401 (scripts know it by this name)
from windlass.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
__all__.append("logging")
