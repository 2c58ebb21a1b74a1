"""Re-exports of the old library: operations on nests of tensors."""

from windlass.utils.homes import names_of

__getattr__, __all__ = names_of(__name__, "windlass.dist.operations", "windlass.core.trees")
