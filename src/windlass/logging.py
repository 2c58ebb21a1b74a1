"""Names that scripts import from here: loggers for several processes (`windlass.compat.rank_logging`)."""

from windlass.compat.rank_logging import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
