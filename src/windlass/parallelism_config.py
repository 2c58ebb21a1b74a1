"""Names that scripts import from here (`windlass.config.plugin_parallelism`)."""

from windlass.config.plugin_parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]
