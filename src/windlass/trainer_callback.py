"""Names that scripts import from here: callbacks and what they see, loaded when they are first asked for."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "windlass.callbacks.flow": ("DefaultFlowCallback",),
    "windlass.callbacks.handler": ("CallbackHandler",),
    "windlass.callbacks.printer": ("PrinterCallback",),
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.compat.script_helpers": ("has_length",),
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.config.enums": ("IntervalStrategy", "SaveStrategy"),
    "windlass.core.events": ("ExportableState", "TrainerCallback", "TrainerControl", "TrainerState"),
})  # fmt: skip
