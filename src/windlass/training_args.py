"""Names that scripts import from here: the arguments of a run, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.compat.state": ("AcceleratorState", "PartialState"),
    "windlass.compat.script_helpers": ("FSDPOption", "log_levels", "str_to_bool", "trainer_log_levels"),
    "windlass.config.accelerator_config": ("AcceleratorConfig",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": (
        "DebugOption", "HubStrategy", "IntervalStrategy", "OptimizerNames", "ParallelMode", "SaveStrategy",
        "SchedulerType",
    ),
    "windlass.config.plugin_words": ("DistributedType",),
    "windlass.config.plugin_parallelism": ("ParallelismConfig",),
})  # fmt: skip
