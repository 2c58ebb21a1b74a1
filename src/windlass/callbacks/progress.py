"""The progress of a run: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, TextIO

from windlass.callbacks.displays import Display, open_display
from windlass.callbacks.rows import Logs, Metrics
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.activity import Activity
from windlass.core.events import TrainerState
from windlass.core.output import say

# Values of logs that count tokens since the run began, by the most exact first.
_TOKEN_COUNTS = ("num_tokens", "num_input_tokens_seen")


class ProgressCallback(TrainerCallback):
    """Displays the progress of training, evaluation and prediction on the main process.

    Args:
        max_str_len: longer strings among the logged values are cut to this many characters.
        file: by default standard output as it is when training begins.

    Attributes:
        samples: samples that this run has trained on, for the speed; set by the run before each log.
    """

    def __init__(self, max_str_len: int = 100, file: TextIO | None = None) -> None:
        self.max_str_len = max_str_len
        self._file = file
        self.samples = 0.0
        self._preparing: Activity | None = None
        self._training: Display | None = None
        self._alone: Display | None = None  # an evaluation or prediction outside training
        self._batches = 0

    def _open(self, total: int, label: str, state: TrainerState, start: int = 0) -> Display:
        return open_display(total, label, start=start, file=self._file, drawn=state.is_world_process_zero)

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.close()
        self._training = self._open(state.max_steps, "train", state, state.global_step)
        self._training.count("samples", 0.0)
        if state.global_step == 0:
            self._training.count("tokens", 0.0)
        else:
            self._training.write(f"continued after step {state.global_step}")

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.advance(state.global_step)

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if self._training is not None and logs:
            self._training.advance(state.global_step)
            if "loss" in logs:
                tokens = next((logs[name] for name in _TOKEN_COUNTS if name in logs), None)
                self._training.count(*(("samples", self.samples) if tokens is None else ("tokens", tokens)))
            self._training.report(logs, self.max_str_len)

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.write(f"saved checkpoint-{state.global_step}")

    def on_prediction_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        total = length_of(kwargs.get("eval_dataloader"))
        if total is None:
            return
        self._batches += 1
        if self._training is not None:
            if self._batches == 1:
                self._training.begin_inner("evaluate", total)
            self._training.advance_inner(self._batches)
            return
        if self._alone is None:
            self._alone = self._open(total, "evaluate", state)
        self._alone.advance(self._batches)

    def on_evaluate(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.end_evaluation()

    def on_predict(
        self, args: Args, state: TrainerState, control: Control, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.end_evaluation()

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
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

    def prepare(self) -> None:
        """Show that a run is being prepared, until it begins or `close` is called."""
        if self._file is None:
            self._preparing = Activity("preparing the run")

    def close(self) -> None:
        """Remove the bars; also called after an exception, when there is no `on_train_end`."""
        self.end_evaluation()
        if self._preparing is not None:
            self._preparing.close()
            self._preparing = None
        if self._training is not None:
            self._training.close()
            self._training = None


def length_of(loader: Any) -> int | None:
    """Return the number of batches; None if the loader has no length (streams)."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an iterable dataset
        return None


def readable(logs: Metrics) -> dict[str, Any]:
    """Return the logs with floats to four digits and without the FLOP counter."""
    return {
        name: f"{value:.4g}" if isinstance(value, float) else value
        for name, value in logs.items()
        if name != "total_flos"
    }


class PrinterCallback(TrainerCallback):
    """Prints each log as a dict on standard output, on the main process of each node.

    Replaces the progress bar if `disable_tqdm` is set.
    """

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            say(readable(logs))
