"""One row for each measurement of a run, as written to `metrics.jsonl` and sent to trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, TypeGuard

from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.metric_values import plain_metrics
from windlass.core.run_clock import run_clock

Row = dict[str, Any]
Metrics = Mapping[str, Any]
Logs = Metrics | None

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TIMING_ENDINGS = (
    "runtime",
    "_per_second",
    "_per_sec",
    "_time",
    "_seconds",
    "_wait",
    "slowest_rank",
    "mfu",
    "memory",
    "_memory_gb",
    "_gib",
    "_compiled_graphs",
    "_recompilations",  # a resumed run compiles again, for fewer shapes
)
_RESERVED = ("event", "step", "epoch", "timing")
_LARGEST_INTEGER = 2**1023  # the largest that every operation on floats takes


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a float, and for an integer that a float can be made of; not for True and False."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INTEGER


class RowCallback(TrainerCallback):
    """Makes rows of logs, evaluations and predictions on the main process, for a subclass.

    An evaluation is usually logged as well, just before its event: both are one row.
    """

    def __init__(self) -> None:
        self._last_row: Row = {}

    def take(self, row: Row, args: TrainingArguments, state: TrainerState) -> None:
        """Write a row, or send it. Called on the main process only.

        Args:
            row: event, step, epoch, values by name, and `timing`, as in `metrics.jsonl`.
            args: the arguments of the run.
            state: its progress, which the row was made at.
        """
        raise NotImplementedError

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if logs:
            self._make_row(_kind(logs), args, state, logs)

    def on_evaluate(
        self, args: Args, state: TrainerState, control: Control, metrics: Logs = None, **kwargs: Any
    ) -> None:
        self._take_unless_logged("evaluate", args, state, metrics)

    def on_predict(
        self, args: Args, state: TrainerState, control: Control, metrics: Logs = None, **kwargs: Any
    ) -> None:
        self._take_unless_logged("predict", args, state, metrics)

    def _take_unless_logged(
        self, event: str, args: TrainingArguments, state: TrainerState, metrics: Logs
    ) -> None:
        if not metrics:
            return
        # By the values, not by the event: a script's `log` may have reported the same metrics under another one.
        logged = measured(self._last_row)  # may have more values: counters that the Trainer adds
        if any(logged.get(name) != value for name, value in measured(row_of(event, state, metrics)).items()):
            self._make_row(event, args, state, metrics)

    def _make_row(self, event: str, args: TrainingArguments, state: TrainerState, metrics: Metrics) -> None:
        if state.is_world_process_zero:
            self._last_row = row_of(event, state, metrics)
            self.take(self._last_row, args, state)


def is_timing(name: str) -> bool:
    """Return True if a metric of this name depends on the clock, the machine or the process alone."""
    return name.endswith(_TIMING_ENDINGS)


def row_of(event: str, state: TrainerState, metrics: Metrics) -> Row:
    """Return the row of one event; what depends on the clock, the machine or the process is under `timing`."""
    row: Row = {"event": event, "step": state.global_step, "epoch": state.epoch}
    timing: Row = {}
    for name, value in plain_metrics(metrics).items():
        if name in ("step", "epoch"):  # log records carry them too
            continue
        target = timing if is_timing(name) else row
        target[f"metric.{name}" if name in _RESERVED else name] = as_json(value)
    measured_speed = run_clock().row if event == "log" else {}
    return {**row, "timing": {**timing, **measured_speed, "wall": time.time()}}


def _kind(logs: Metrics) -> str:
    if "train_runtime" in logs and "train_loss" in logs:
        return "summary"
    # Under `include_num_input_tokens_seen` any log may carry a `train_runtime`.
    runtimes = (name for name in logs if name.endswith("_runtime") and not name.startswith("train_"))
    return "evaluate" if any(runtimes) or any(name.startswith("eval_") for name in logs) else "log"


def as_json(value: Any) -> Any:
    """Return plain data with strings for the floats that JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


def revived(value: Any) -> Any:
    """Return a row, or a part of it, with NaN and the infinities as floats."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: revived(item) for key, item in value.items()}
    return [revived(item) for item in value] if isinstance(value, list) else value


def repeatable(row: Row) -> Row:
    """Return the part of a row that another run of the same training would write too."""
    return {name: value for name, value in row.items() if name != "timing"}


def measured(row: Row) -> Row:
    """Return the values of a row without its kind and when it was written."""
    timing = {name: value for name, value in row.get("timing", {}).items() if name not in ("wall", "elapsed")}
    return {**{name: value for name, value in row.items() if name not in ("event", "timing")}, **timing}


def described_event(row: Metrics) -> tuple[str, str] | None:
    """Return the kind and the text of a row that is an event: rollbacks, skipped updates, micro-batches too large for
    memory, alerts; None for metrics.
    """
    if "alert" in row:
        return "alert", str(row.get("message", row["alert"]))
    if "rolled_back_to" in row:
        left_out = f" and {row['samples_left_out']} samples left out" if "samples_left_out" in row else ""
        to = row["rolled_back_to"]
        back = f"rolled back from update {row.get('rolled_back_from')} to the checkpoint of {to}"
        undone = f"{row.get('updates_undone')} updates undone"
        return "rolled_back", f"{back}, {undone}{left_out}: {row.get('reason')}"
    if "skipped_update" in row:
        return "skipped_update", f"update {row['skipped_update']} skipped: {row.get('reason')}"
    if "micro_batch_too_large" in row:
        size = f"{row.get('micro_batches')} x {row.get('micro_batch_size')} samples"
        text = f"out of memory at micro-batch size {row['micro_batch_too_large']}; continued with {size}"
        return "out_of_memory", text
    return None
