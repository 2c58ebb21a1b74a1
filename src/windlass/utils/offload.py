"""Names that scripts import from here: weights in files."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(__name__, "windlass.compat.offloaded", "windlass.compat.attach_hooks")
