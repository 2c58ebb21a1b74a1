"""Names that scripts import from here: callbacks and what they see, loaded when they are first asked for."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "windlass.callbacks.flow": ("DefaultFlowCallback",),
    "windlass.callbacks.handler": ("CallbackHandler",),
    "windlass.callbacks.printer": ("PrinterCallback",),
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.compat.script_helpers": ("has_length",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": ("IntervalStrategy", "SaveStrategy"),
    "windlass.core.events": ("ExportableState", "TrainerCallback", "TrainerControl", "TrainerState"),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
