"""Names that scripts import from here: how a Trainer chooses its optimizer, loaded when they are first asked for."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.compat.model_queries": (
        "check_target_module_exists",
        "has_mixed_dtensor",
        "is_optimizer_factory",
    ),
    "windlass.config.enums": ("OptimizerNames", "ParallelMode"),
    "windlass.optim.optimizers.adafactor": ("Adafactor",),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
