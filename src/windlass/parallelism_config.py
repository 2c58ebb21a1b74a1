"""Re-export of the old library (`windlass.compat.plugins`)."""

from windlass.compat.plugins import ParallelismConfig as ParallelismConfig
