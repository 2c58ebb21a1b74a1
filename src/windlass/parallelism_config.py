"""Re-export of the old library (`windlass.config.plugin_parallelism`)."""

from windlass.config.plugin_parallelism import ParallelismConfig as ParallelismConfig
