"""Re-exports of the old library: memory of devices."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(__name__, "windlass.accelerator.device_cache", "windlass.compat.batch_size")
