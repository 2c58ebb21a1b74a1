"""Names that scripts import from here: who this process is (`windlass.accelerator.state`)."""

from windlass.accelerator.state import AcceleratorState, GradientState, PartialState
from windlass.config.plugin_words import DistributedType

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]
