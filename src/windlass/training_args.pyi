from windlass.compat.plugins import ParallelismConfig as ParallelismConfig
from windlass.compat.script_helpers import (
    FSDPOption as FSDPOption, str_to_bool as str_to_bool,
    trainer_log_levels as trainer_log_levels,
)
from windlass.compat.state import (
    AcceleratorState as AcceleratorState, PartialState as PartialState,
)
from windlass.config.accelerator_config import AcceleratorConfig as AcceleratorConfig
from windlass.config.arguments import TrainingArguments as TrainingArguments
from windlass.config.enums import (
    DebugOption as DebugOption, DistributedType as DistributedType, HubStrategy as HubStrategy,
    IntervalStrategy as IntervalStrategy, OptimizerNames as OptimizerNames, ParallelMode as ParallelMode,
    SaveStrategy as SaveStrategy, SchedulerType as SchedulerType,
)
from windlass.core.logs import log_levels as log_levels
