"""Re-exports of the old library: seeds."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(__name__, "windlass.compat.seeds")
