"""The course of a run as this process saw it: where it took the run up, and whether it was stopped on the way."""

from __future__ import annotations

from typing import Any

from windlass.core.events import TrainerCallback, TrainerControl, TrainerState


class Course(TrainerCallback):
    """Attributes:
    first_step: the step at which training began in this process: 0, or that of the checkpoint it was resumed from.
    stopped: the run ended before its last step. No recipe stops early by itself, so the user did (Ctrl-C).
    """

    def __init__(self) -> None:
        self.first_step = 0
        self.stopped = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first_step = state.global_step

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopped = control.should_training_stop and state.global_step < state.max_steps
