"""Subscribers of a run's events. Scripts import them from here; they are loaded when they are first asked for."""

from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "windlass.callbacks.flow": ("DefaultFlowCallback",),
    "windlass.callbacks.handler": ("CallbackHandler",),
    "windlass.callbacks.metrics_log": ("MetricsLogCallback", "read_metrics"),
    "windlass.callbacks.notebook": ("NotebookProgressCallback",),
    "windlass.callbacks.printer": ("PrinterCallback",),
    "windlass.callbacks.progress": ("ProgressCallback",),
    "windlass.callbacks.report": ("ReportCallback",),
    "windlass.callbacks.weight_averaging": ("EMACallback", "SWACallback"),
    "windlass.core.events": ("ExportableState", "TrainerCallback", "TrainerControl", "TrainerState"),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES)
__all__ = sorted(_NAMES)
