"""Re-exports of the old library: the state of this process (`windlass.compat.state`)."""

from windlass.compat.refused_names import WHY
from windlass.compat.state import AcceleratorState, GradientState, PartialState, is_initialized
from windlass.config.enums import DistributedType
from windlass.core.lazy import loader_of

__getattr__ = loader_of(__name__, {}, WHY)
__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
