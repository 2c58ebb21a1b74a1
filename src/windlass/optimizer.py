"""Re-export of the old library (`windlass.accelerator.optimizer`)."""

from windlass.accelerator.optimizer import PreparedOptimizer as AcceleratedOptimizer
from windlass.compat.refused_names import WHY
from windlass.core.lazy import loader_of
from windlass.core.trees import send_to_device as move_to_device

__getattr__ = loader_of(__name__, {}, WHY)
__all__ = ["AcceleratedOptimizer", "move_to_device"]
