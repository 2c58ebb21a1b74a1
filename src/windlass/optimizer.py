"""Names that scripts import from here (`windlass.accelerator.optimizer`)."""

from windlass.accelerator.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
