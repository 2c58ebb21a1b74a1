"""Names that scripts import from here (`windlass.accelerator.local_sgd`)."""

from windlass.accelerator.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
