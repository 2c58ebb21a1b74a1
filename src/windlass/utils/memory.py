"""Names that scripts import from here: memory of devices."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(__name__, "windlass.accelerator.device_cache")
