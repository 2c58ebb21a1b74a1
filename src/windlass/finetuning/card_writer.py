"""`CardWriter`: a model's card beside each checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.logs import get_job_logger

logger = get_job_logger(__name__)


class CardWriter(TrainerCallback):
    """Writes the model's card when a checkpoint is saved. `write` does it, on the main process."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        try:
            self._write()
        except OSError as error:  # a full disk: training goes on
            logger.warning("the model card could not be written: %s", error)
