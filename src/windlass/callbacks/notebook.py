"""Progress in a notebook: a bar, the curves of the losses and a table, which are updated in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from windlass.callbacks.charts import CHART_STYLE, Point, Series, line_chart, short, thinned
from windlass.callbacks.log_table import clock_text
from windlass.callbacks.progress import ProgressCallback, length_of
from windlass.callbacks.rows import Logs, Metrics, Row, is_timing
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require
from windlass.core.output import in_html

logger = get_logger(__name__)
_REDRAW_SECONDS = 0.5
# The page is sent as a whole whenever it changes, and saved with the notebook.
_MOST_ROWS, _MOST_POINTS = 20, 100
_TRAINING, _VALIDATION = "Training Loss", "Validation Loss"
# Grids and labels in the colour of the text, which notebooks choose; curves in colours for light and dark pages.
_STYLE = """\
.windlass { --c0: #2a78d6; --c1: #eb6834; --soft: currentColor; --faint: currentColor; --card: transparent;
  --line: currentColor; --axis: currentColor; max-width: 560px; }
.windlass figure { margin: 6px 0; }
.windlass line { opacity: 0.25; }
""" + "".join(f".windlass {rule}}}\n" for rule in CHART_STYLE.split("}\n")[:-1])


class NotebookProgressCallback(ProgressCallback):
    """Displays training in a notebook cell: a bar, the curves of the losses, and a table with one row per evaluation,
    or per log if the run has no evaluation. An evaluation or prediction outside training has a bar.

    The default in a notebook. Requires IPython, which every notebook has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: _CellPage | None = None
        self._evaluation: _CellPage | None = None  # outside training

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.close()
        self._run = _CellPage("train", state.max_steps, state.global_step, state.is_world_process_zero)
        for logs in state.log_history:  # of a resumed run
            if any(name.startswith("eval_") for name in logs):
                self._run.add_evaluation(_place(args, logs["step"], logs.get("epoch")), logs)
            elif "loss" in logs:
                self._run.add_loss(logs["step"], logs["loss"], as_row=args.eval_strategy == "no")
        self._run.show()

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if self._run is not None and not control.should_log:  # else `on_log` shows it, with the values
            self._run.advance(state.global_step)

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if self._run is not None and logs is not None and "loss" in logs:
            self._run.add_loss(state.global_step, logs["loss"], as_row=args.eval_strategy == "no")
            self._run.advance(state.global_step)

    def on_prediction_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        total = length_of(kwargs.get("eval_dataloader"))
        if total is None:
            return
        self._batches += 1
        if self._run is not None:
            self._run.evaluate(self._batches, total)
            return
        if self._evaluation is None:
            self._evaluation = _CellPage("evaluate", total, 0, state.is_world_process_zero)
        self._evaluation.advance(self._batches)

    def on_evaluate(
        self, args: Args, state: TrainerState, control: Control, metrics: Logs = None, **kwargs: Any
    ) -> None:
        self.end_evaluation()
        if self._run is not None:
            self._run.add_evaluation(_place(args, state.global_step, state.epoch), metrics or {})
            self._run.show()

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.advance(state.global_step)
        self.close()

    def end_evaluation(self) -> None:
        """End the bar of an evaluation or prediction; also called after an exception in it."""
        super().end_evaluation()
        if self._run is not None:
            self._run.evaluate(0, 0)
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def close(self) -> None:
        """Replace the bars by what was done; also called after an exception, when there is no `on_train_end`."""
        super().close()
        if self._run is not None:
            self._run.close()
            self._run = None


def _place(args: TrainingArguments, step: int, epoch: float | None) -> Row:
    """The first columns of a row: the epoch where evaluations are at the ends of epochs, and the step."""
    return {"Epoch": epoch, "Step": step} if args.eval_strategy == "epoch" else {"Step": step}


class _CellPage:
    """What a cell displays of one run, or of one evaluation."""

    def __init__(self, label: str, total: int, start: int, drawn: bool) -> None:
        self._label, self._total, self._first, self._drawn = label, total, start, drawn
        self._step = start
        self._evaluated, self._batches = 0, 0
        self._rows: list[Row] = []
        self._losses: list[Point] = []
        self._evaluations: list[Point] = []
        self._ended = False
        self._handle: Any = None
        self._began, self._shown = time.monotonic(), 0.0

    def advance(self, step: int) -> None:
        self._step = step
        self._moved()

    def evaluate(self, done: int, total: int) -> None:
        """Note the progress of an evaluation within the run; a total of 0 ends it."""
        self._evaluated, self._batches = done, total
        self._moved()

    def add_loss(self, step: int, loss: Any, *, as_row: bool) -> None:
        self._losses = _with_point(self._losses, (step, float(loss)))
        if as_row:
            self._rows.append({"Step": step, _TRAINING: loss})

    def add_evaluation(self, place: Row, metrics: Metrics) -> None:
        row = {**place, _TRAINING: self._losses[-1][1] if self._losses else None, **_titled(metrics)}
        if self._rows and self._rows[-1]["Step"] == place["Step"]:
            self._rows[-1].update(row)  # a further evaluation set at the same step
        else:
            self._rows.append(row)
        if _VALIDATION in row:
            self._evaluations = _with_point(self._evaluations, (place["Step"], float(row[_VALIDATION])))

    def close(self) -> None:
        self._ended = True
        self.show()

    def _moved(self) -> None:
        if time.monotonic() - self._shown >= _REDRAW_SECONDS:
            self.show()

    def show(self) -> None:
        """Display the page as it is now."""
        if not self._drawn:
            return
        display = require("IPython.display", "show progress in a notebook")
        self._shown = time.monotonic()
        series = [Series("training", self._losses), Series("validation", self._evaluations)]
        status = self._status()
        bar = None if self._ended else (self._step, self._total)
        data = {"text/html": progress_html(status, bar, self._rows, series), "text/plain": status}
        try:
            if self._handle is None:
                self._handle = display.display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)
        except Exception as error:  # a closed notebook must not end training
            warn_once(logger, f"the notebook displays no progress; training continues: {error!r}")

    def _status(self) -> str:
        elapsed, done = self._shown - self._began, self._step - self._first
        position = f"{self._label} {self._step}/{self._total}"
        if self._ended:
            return f"{position} [{clock_text(elapsed)}]"
        left = elapsed / done * (self._total - self._step) if done else float("inf")
        evaluation = f", evaluate {self._evaluated}/{self._batches}" if self._batches else ""
        return f"{position} [{clock_text(elapsed)}<{clock_text(left)}]{evaluation}"


def _with_point(points: list[Point], point: Point) -> list[Point]:
    """The points with another one, and without most of the earlier ones if they are many."""
    return [*(points if len(points) < 2 * _MOST_POINTS else thinned(points, _MOST_POINTS)), point]


def progress_html(
    status: str, bar: tuple[int, int] | None, rows: Sequence[Row], series: Sequence[Series] = ()
) -> str:
    """Return a bar (its value and its end; None for no bar) with a line of text, a chart of the losses once there are
    two of them, and a table with a column per name.
    """
    drawn = chart = ""
    if bar is not None:
        style = "width:300px;vertical-align:middle"
        drawn = f'<progress value="{bar[0]}" max="{bar[1]}" style="{style}"></progress> '
    if any(len(curve.points) > 1 for curve in series):
        chart = f"<style>{_STYLE}</style>{line_chart('loss', [curve for curve in series if curve.points])}"
    return f'<div class="windlass"><div>{drawn}{in_html(status)}</div>{chart}{_table(rows)}</div>'


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    last = rows[-_MOST_ROWS:]
    names = list(dict.fromkeys(name for row in last for name in row))
    head = "".join(f"<th>{in_html(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(row.get(name))}</td>' for name in names)}</tr>" for row in last
    )
    earlier = f"<div>{len(rows) - _MOST_ROWS} earlier rows are in metrics.jsonl</div>" * (
        len(rows) > _MOST_ROWS
    )
    return f"{earlier}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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
        titled[_VALIDATION if name == "eval_loss" else words] = value
    return titled
