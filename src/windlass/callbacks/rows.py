"""A row for everything a run measured: what `metrics.jsonl` holds and trackers are sent."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.metric_values import plain_metrics

Row = dict[str, Any]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TIMING_ENDINGS = (
    "runtime",
    "_per_second",
    "_per_sec",
    "_time",
    "_seconds",
    "_wait",
    "mfu",
    "memory",
    "_memory_gb",
    "_gib",
)
_RESERVED = ("event", "step", "epoch", "timing")


class RowCallback(TrainerCallback):
    """Turns what is logged, evaluated and predicted into rows, on the main process; a subclass takes them.

    An evaluation is usually logged as well, just before its event: that is one row.
    """

    def __init__(self) -> None:
        self._last_row: Row = {}

    def take(self, row: Row, args: Any, state: TrainerState) -> None:
        """Keep a row, or send it on."""
        raise NotImplementedError

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs:
            self._offer(_kind(logs), args, state, logs)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offer_unless_logged("evaluate", args, state, metrics)

    def on_predict(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offer_unless_logged("predict", args, state, metrics)

    def _offer_unless_logged(
        self, event: str, args: Any, state: TrainerState, metrics: Mapping[str, Any] | None
    ) -> None:
        if not metrics:
            return
        said = measured(self._last_row)  # the log may hold more: counters that the Trainer adds
        if any(said.get(name) != value for name, value in measured(row_of(event, state, metrics)).items()):
            self._offer(event, args, state, metrics)

    def _offer(self, event: str, args: Any, state: TrainerState, metrics: Mapping[str, Any]) -> None:
        if state.is_world_process_zero:
            self._last_row = row_of(event, state, metrics)
            self.take(self._last_row, args, state)


def is_timing(name: str) -> bool:
    """Whether a metric of this name depends on the clock or the machine rather than on the computation."""
    return name.endswith(_TIMING_ENDINGS)


def row_of(event: str, state: TrainerState, metrics: Mapping[str, Any]) -> Row:
    """The row of one event: what depends on the clock or the machine lies under `timing`."""
    row: Row = {"event": event, "step": state.global_step, "epoch": state.epoch}
    timing: Row = {}
    for name, value in plain_metrics(metrics).items():
        if name in ("step", "epoch"):  # log records carry them too
            continue
        target = timing if is_timing(name) else row
        target[f"metric.{name}" if name in _RESERVED else name] = _worded(value)
    return {**row, "timing": {**timing, "wall": time.time()}}


def _kind(logs: Mapping[str, Any]) -> str:
    if "train_runtime" in logs and "train_loss" in logs:
        return "summary"
    # Under `include_num_input_tokens_seen` any log may carry a `train_runtime`.
    runtimes = (name for name in logs if name.endswith("_runtime") and not name.startswith("train_"))
    return "evaluate" if any(runtimes) or any(name.startswith("eval_") for name in logs) else "log"


def _worded(value: Any) -> Any:
    """Plain data with words for the floats that JSON has none for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if isinstance(value, dict):
        return {key: _worded(item) for key, item in value.items()}
    return [_worded(item) for item in value] if isinstance(value, list) else value


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def revived(value: Any) -> Any:
    """A row, or a part of it, with NaN and the infinities as floats again."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revived(item) for item in value]
    return value


def repeatable(row: Row) -> Row:
    """What another run of the same training would write too."""
    return {name: value for name, value in row.items() if name != "timing"}


def measured(row: Row) -> Row:
    """What a row says apart from what kind it is and when it was written."""
    timing = {name: value for name, value in row.get("timing", {}).items() if name != "wall"}
    return {**{name: value for name, value in row.items() if name not in ("event", "timing")}, **timing}
