"""Progress in a notebook: a bar and a table of losses that are updated in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from windlass.callbacks.charts import short
from windlass.callbacks.displays import clock_text
from windlass.callbacks.rows import Logs, Metrics, Row, is_timing
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require
from windlass.core.output import in_html

logger = get_logger(__name__)
_REDRAW_SECONDS = 0.5


class NotebookProgressCallback(TrainerCallback):
    """Displays training in a notebook cell: one row per evaluation, or per log if the run has no evaluation.

    Requires IPython, which every notebook has.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._training_loss: float | None = None
        self._handle: Any = None
        self._last = self._began = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._rows, self._training_loss = [], None
        self._began = time.monotonic()
        self._handle = None
        self._show(state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if time.monotonic() - self._last >= _REDRAW_SECONDS:
            self._show(state)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        self._training_loss = logs["loss"]
        if args.eval_strategy == "no":
            self._rows.append({"Step": state.global_step, "Training Loss": logs["loss"]})
            self._show(state)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Logs = None, **kwargs: Any
    ) -> None:
        where = {"Epoch": state.epoch} if args.eval_strategy == "epoch" else {"Step": state.global_step}
        row = {**where, "Training Loss": self._training_loss, **_titled(metrics or {})}
        if self._rows and all(self._rows[-1].get(name) == value for name, value in where.items()):
            self._rows[-1].update(row)  # a further evaluation set at the same step
        else:
            self._rows.append(row)
        self._show(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show(state)
        self._handle = None

    def _show(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        display = require("IPython.display", "show progress in a notebook")
        self._last = time.monotonic()
        elapsed = self._last - self._began if self._began else 0.0
        page = display.HTML(progress_html(state.global_step, state.max_steps, elapsed, self._rows))
        try:
            if self._handle is None:
                self._handle = display.display(page, display_id=True)
            else:
                self._handle.update(page)
        except Exception as error:  # a closed notebook must not end training
            warn_once(logger, f"the notebook displays no progress; training continues: {error!r}")


def progress_html(step: int, total: int, elapsed: float, rows: Sequence[Row]) -> str:
    """Return a bar over `total` updates (none if `total` is 0, outside training) and a table with a column per name.
    `elapsed` is in seconds since training began.
    """
    bar = (
        f'<progress value="{step}" max="{total}" style="width:300px;vertical-align:middle"></progress> '
        f"{step}/{total} [{clock_text(elapsed)}]"
    )
    return f"<div>{bar if total else ''}</div>{_table(rows)}"


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{in_html(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(row.get(name))}</td>' for name in names)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    if isinstance(value, int | float):
        return short(value, 6)
    return "No log" if value is None else in_html(str(value))


def _titled(metrics: Metrics) -> Row:
    """Return `eval_loss` as "Validation Loss", `eval_f1_macro` as "F1 Macro", without timing and position."""
    titled = {}
    for name, value in metrics.items():
        if name in ("epoch", "step", "total_flos") or is_timing(name):
            continue
        words = " ".join(word.capitalize() for word in name.removeprefix("eval_").split("_"))
        titled["Validation Loss" if name == "eval_loss" else words] = value
    return titled
