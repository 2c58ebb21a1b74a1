"""Re-exports of the old library: loggers for several processes (`windlass.compat.rank_logging`)."""

from windlass.compat.rank_logging import MultiProcessAdapter as MultiProcessAdapter
from windlass.compat.rank_logging import get_logger as get_logger
