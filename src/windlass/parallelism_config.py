"""Re-export of the old library (`windlass.compat.plugin_parallelism`)."""

from windlass.compat.plugin_parallelism import ParallelismConfig as ParallelismConfig
