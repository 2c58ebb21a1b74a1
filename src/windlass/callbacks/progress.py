"""The progress of a run: a bar on a terminal, a page in a notebook, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, TextIO

from windlass.callbacks.charts import Point, short, text_chart, thinned
from windlass.callbacks.displays import Display, Pace, open_display
from windlass.callbacks.log_table import clock_text
from windlass.callbacks.rows import Logs, Metrics, Row, is_number, is_timing
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.activity import Activity
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require
from windlass.core.output import in_html, say

# Values of logs that count tokens since the run began, by the most exact first.
_TOKEN_COUNTS = ("num_tokens", "num_input_tokens_seen")


class ProgressCallback(TrainerCallback):
    """Displays the progress of training, evaluation and prediction on the main process.

    Args:
        max_str_len: longer strings among the logged values are cut to this many characters.
        file: by default standard output as it is when training begins.

    Attributes:
        samples: samples that this run has trained on, for the speed; set by the run before each log.
        training_bar: what shows the run, while it lasts, for subclasses: `write(text)` adds a line.
    """

    def __init__(self, max_str_len: int = 100, file: TextIO | None = None) -> None:
        self.max_str_len = max_str_len
        self._file = file
        self.samples = 0.0
        self._preparing: Activity | None = None
        # Two names: subclasses that scripts have assign bars of another kind to the public one.
        self.training_bar: Any = None
        self._training: Display | None = None
        self._alone: Display | None = None  # an evaluation or prediction outside training
        self._batches = 0

    def _open(self, total: int, label: str, state: TrainerState, start: int = 0) -> Display:
        return open_display(total, label, start=start, file=self._file, drawn=state.is_world_process_zero)

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.close()
        self.training_bar = self._training = self._open(state.max_steps, "train", state, state.global_step)
        self._training.count("samples", 0.0)
        if state.global_step == 0:
            self._training.count("tokens", 0.0)
        elif state.global_step < state.max_steps:
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
            self.training_bar = self._training = None


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


logger = get_logger(__name__)
# The page is sent as a whole whenever it changes, and saved with the notebook.
_MOST_ROWS, _MOST_POINTS = 20, 100
_TRAINING, _VALIDATION = "Training Loss", "Validation Loss"


class NotebookProgressCallback(ProgressCallback):
    """Displays training in a notebook cell: a bar, the curves of the losses, and a table with one row per evaluation,
    or per log if the run has no evaluation. An evaluation or prediction outside training has a bar.

    The default in a notebook. Requires IPython, which every notebook has.
    """

    def _open(self, total: int, label: str, state: TrainerState, start: int = 0) -> Display:
        return _CellPage(total, label, start=start, drawn=state.is_world_process_zero)

    @property
    def _page(self) -> _CellPage | None:
        """The page of the run, while it lasts."""
        return self._training if isinstance(self._training, _CellPage) else None

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        page = self._page
        assert page is not None
        for logs in state.log_history:  # of a resumed run; a script may have added anything
            if not is_number(logs.get("step")):
                continue
            if any(name.startswith("eval_") for name in logs):
                page.add_evaluation(_place(args, logs["step"], logs.get("epoch")), logs)
            elif "loss" in logs:
                page.add_loss(logs["step"], logs["loss"], as_row=args.eval_strategy == "no")
        page.show()

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if not control.should_log:  # else `on_log` shows it, with the values
            super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self, args: Args, state: TrainerState, control: Control, logs: Logs = None, **kwargs: Any
    ) -> None:
        if self._page is not None and logs is not None and "loss" in logs:
            self._page.add_loss(state.global_step, logs["loss"], as_row=args.eval_strategy == "no")
            self._page.advance(state.global_step)

    def on_evaluate(
        self, args: Args, state: TrainerState, control: Control, metrics: Logs = None, **kwargs: Any
    ) -> None:
        self.end_evaluation()
        if self._page is not None:
            self._page.add_evaluation(_place(args, state.global_step, state.epoch), metrics or {})
            self._page.show()


def _place(args: Args, step: int, epoch: float | None) -> Row:
    """The first columns of a row: the epoch where evaluations are at the ends of epochs, and the step."""
    return {"Epoch": epoch, "Step": step} if args.eval_strategy == "epoch" else {"Step": step}


class _CellPage(Display):
    """What a cell displays of one run, or of one evaluation. Losses and metrics are added by separate methods."""

    seconds = 0.5

    def __init__(self, total: int, label: str, *, start: int, drawn: bool) -> None:
        super().__init__(total, label, start=start)
        self._drawn, self._ended, self._handle = drawn, False, None
        self._last = 0.0  # the first change is shown
        self._rows: list[Row] = []
        self._losses: list[Point] = []
        self._evaluations: list[Point] = []

    def add_loss(self, step: int, loss: Any, *, as_row: bool) -> None:
        if is_number(loss):  # a script may log text under this name
            self._losses = _with_point(self._losses, (step, loss))
        if as_row:
            self._rows.append({"Step": step, _TRAINING: loss})

    def add_evaluation(self, place: Row, metrics: Metrics) -> None:
        row = {**place, _TRAINING: self._losses[-1][1] if self._losses else None, **_titled(metrics)}
        if self._rows and self._rows[-1]["Step"] == place["Step"]:
            self._rows[-1].update(row)  # a further evaluation set at the same step
        else:
            self._rows.append(row)
        if is_number(row.get(_VALIDATION)):
            self._evaluations = _with_point(self._evaluations, (place["Step"], row[_VALIDATION]))

    def close(self) -> None:
        super().close()
        self._ended = True
        self.show()

    def show(self) -> None:
        """Display the page as it is now."""
        self._show(self._pace)

    def _show(self, pace: Pace) -> None:
        super()._show(pace)
        if not self._drawn:
            return
        display = require("IPython.display", "show progress in a notebook")
        status, chart = self._status(), text_chart(self._losses, self._evaluations)
        bar = None if self._ended else (self._pace.step, self._pace.total)
        data = {"text/html": progress_html(status, bar, self._rows, chart), "text/plain": status}
        try:
            if self._handle is None:
                self._handle = display.display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)
        except Exception as error:  # a closed notebook must not end training
            warn_once(logger, f"the notebook displays no progress; training continues: {error!r}")

    def _status(self) -> str:
        run, inner = self._pace, self._inner
        time = clock_text(run.elapsed) + ("" if self._ended else f"<{clock_text(run.left)}")
        evaluation = "" if inner is None else f", {inner.label} {inner.step}/{inner.total}"
        return f"{run.label} {run.step}/{run.total} [{time}]{evaluation}"


def _with_point(points: list[Point], point: Point) -> list[Point]:
    """The points with another one, and without most of the earlier ones if they are many."""
    return [*(points if len(points) < 2 * _MOST_POINTS else thinned(points, _MOST_POINTS)), point]


def progress_html(status: str, bar: tuple[int, int] | None, rows: Sequence[Row], chart: str = "") -> str:
    """Return a bar (its value and its end; None for no bar) with a line of text, a chart of the losses as text, and a
    table with a column per name.
    """
    drawn = ""
    if bar is not None:
        style = "width:300px;vertical-align:middle"
        drawn = f'<progress value="{bar[0]}" max="{bar[1]}" style="{style}"></progress> '
    losses = f"<pre>loss: * training, o validation\n{chart}</pre>" if chart else ""
    return f"<div><div>{drawn}{in_html(status)}</div>{losses}{_table(rows)}</div>"


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    last = rows[-_MOST_ROWS:]
    names = list(dict.fromkeys(name for row in last for name in row))
    head = "".join(f"<th>{in_html(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(row.get(name))}</td>' for name in names)}</tr>" for row in last
    )
    earlier = ""
    if len(rows) > _MOST_ROWS:
        earlier = f"<div>{len(rows) - _MOST_ROWS} earlier rows are in metrics.jsonl</div>"
    return f"{earlier}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    if is_number(value):
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
