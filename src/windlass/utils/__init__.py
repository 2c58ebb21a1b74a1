"""Names that scripts reach as `windlass.utils`: `windlass.utils.logging.set_verbosity(level)` and the like."""

from windlass.core import logs as logging

__all__ = ["logging"]
