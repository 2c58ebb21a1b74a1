from windlass.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
from windlass.callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
from windlass.callbacks.handler import CallbackHandler as CallbackHandler
from windlass.callbacks.progress import (
    PrinterCallback as PrinterCallback, ProgressCallback as ProgressCallback,
)
from windlass.compat.script_helpers import has_length as has_length
from windlass.config.arguments import TrainingArguments as TrainingArguments
from windlass.config.callback_interface import TrainerCallback as TrainerCallback
from windlass.config.enums import (
    IntervalStrategy as IntervalStrategy, SaveStrategy as SaveStrategy,
)
from windlass.core.events import (
    ExportableState as ExportableState, TrainerControl as TrainerControl, TrainerState as TrainerState,
)
