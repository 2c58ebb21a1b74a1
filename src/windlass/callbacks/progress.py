"""The progress of a run: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, TextIO

from windlass.callbacks.displays import Display, open_display
from windlass.callbacks.printer import readable
from windlass.callbacks.rows import Logs
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState


class ProgressCallback(TrainerCallback):
    """Displays the progress of training, evaluation and prediction on the main process.

    Args:
        max_str_len: longer strings among the logged values are cut to this many characters.
        file: by default standard output as it is when training begins.
    """

    def __init__(self, max_str_len: int = 100, file: TextIO | None = None) -> None:
        self.max_str_len = max_str_len
        self._file = file
        self._training: Display | None = None
        self._alone: Display | None = None  # an evaluation or prediction outside training
        self._batches = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close()
        self._training = open_display(
            state.max_steps,
            "train",
            start=state.global_step,
            file=self._file,
            drawn=state.is_world_process_zero,
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.advance(state.global_step)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: Any
    ) -> None:
        if self._training is not None and logs:
            self._training.advance(state.global_step)
            shown = readable(logs, self.max_str_len)
            self._training.write(*(f"{name} {value}" for name, value in shown.items()))

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        total = _length(kwargs.get("eval_dataloader"))
        if total is None:
            return
        self._batches += 1
        if self._training is not None:
            if self._batches == 1:
                self._training.begin_inner("evaluate", total)
            self._training.advance_inner(self._batches)
            return
        if self._alone is None:
            self._alone = open_display(total, "evaluate", file=self._file, drawn=state.is_world_process_zero)
        self._alone.advance(self._batches)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.end_evaluation()

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.end_evaluation()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.advance(state.global_step)
        self.close()

    def end_evaluation(self) -> None:
        """Remove the bar of an evaluation or prediction; also called after an exception in it."""
        self._batches = 0
        if self._training is not None:
            self._training.end_inner()
        if self._alone is not None:
            self._alone.close()
            self._alone = None

    def close(self) -> None:
        """Remove the bars; also called after an exception, when there is no `on_train_end`."""
        self.end_evaluation()
        if self._training is not None:
            self._training.close()
            self._training = None


def _length(loader: Any) -> int | None:
    """Return the number of batches; None if the loader has no length (streams)."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an iterable dataset
        return None
