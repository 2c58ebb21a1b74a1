"""Names that scripts import from here: the arguments of a run, loaded when they are first asked for."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.compat.state": ("AcceleratorState", "PartialState"),
    "windlass.compat.script_helpers": ("FSDPOption", "log_levels", "str_to_bool", "trainer_log_levels"),
    "windlass.config.accelerator_config": ("AcceleratorConfig",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": (
        "DebugOption", "HubStrategy", "IntervalStrategy", "OptimizerNames", "ParallelMode", "SaveStrategy",
        "SchedulerType",
    ),
    "windlass.config.plugin_words": ("DistributedType",),
    "windlass.config.plugins": ("ParallelismConfig",),
}  # fmt: skip
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
