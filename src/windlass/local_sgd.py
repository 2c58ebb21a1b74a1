"""Re-export of the old library (`windlass.compat.local_sgd`)."""

from windlass.compat.local_sgd import LocalSGD as LocalSGD
