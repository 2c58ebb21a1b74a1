"""The callbacks that scripts take as every Trainer's own."""

from __future__ import annotations

from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.progress import ProgressCallback
from windlass.core.events import TrainerCallback

DEFAULT_CALLBACKS: list[type[TrainerCallback]] = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK: type[TrainerCallback] = ProgressCallback
