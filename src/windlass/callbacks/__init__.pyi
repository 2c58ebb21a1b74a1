from windlass.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
from windlass.callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
from windlass.callbacks.handler import CallbackHandler as CallbackHandler
from windlass.callbacks.metrics_log import (
    MetricsLogCallback as MetricsLogCallback, read_metrics as read_metrics,
)
from windlass.callbacks.progress import (
    NotebookProgressCallback as NotebookProgressCallback, PrinterCallback as PrinterCallback,
    ProgressCallback as ProgressCallback,
)
from windlass.callbacks.report import ReportCallback as ReportCallback
from windlass.callbacks.weight_averaging import (
    EMACallback as EMACallback, SWACallback as SWACallback,
)
from windlass.config.callback_interface import TrainerCallback as TrainerCallback
from windlass.core.events import (
    ExportableState as ExportableState, TrainerControl as TrainerControl, TrainerState as TrainerState,
)
