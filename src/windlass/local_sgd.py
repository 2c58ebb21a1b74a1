"""Names that scripts import from here (`windlass.compat.local_sgd`)."""

from windlass.compat.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
