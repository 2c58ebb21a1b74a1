"""The report of a run: `report.html` and `training.png`, made from its folder (`run.json`, `metrics.jsonl`)."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass.callbacks.charts import LARGEST, Point, labels, ticks_around
from windlass.callbacks.page_file import PageRun, render_page
from windlass.callbacks.page_tables import History, TrainingTime, curve, evaluation_losses
from windlass.callbacks.rows import Row, measured
from windlass.callbacks.run_record import Record
from windlass.callbacks.run_view import RunView, read_run, status_in_words
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.locations import at_home, local_folder
from windlass.core.logs import get_logger
from windlass.core.optional import install_command, is_available, require
from windlass.core.output import one_line
from windlass.core.whole_file import write_whole

logger = get_logger(__name__)
Facts = Sequence[tuple[str, str]]


class ReportCallback(TrainerCallback):
    """Writes `report.html` into the output folder at each save and at the end, and `training.png` at the end. A run
    that is resumed when it is complete leaves them as they are.

    On the main process only. A report that cannot be written is warned of and does not stop training.
    `report_to="report"` adds this callback.

    Args:
        output_dir: the folder of the report; by default the run's.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if output_dir is None else at_home(output_dir).absolute()
        self._first_step = 0

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._first_step = state.global_step

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.write(args, state, runs=True)

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        is_written = (self._folder or local_folder(args.output_path)).joinpath("report.html").exists()
        # A run that was complete when it was resumed made no update: its page has the end of the run that did.
        if state.global_step > self._first_step or not is_written:
            self.write(args, state)

    def write(self, args: TrainingArguments, state: TrainerState, *, runs: bool = False) -> None:
        """Write the page; of a run that ended, the picture too. A file that cannot be written is warned of.

        Args:
            args: `output_path` is read, the folder of the run.
            state: on processes other than the main one nothing is written.
            runs: the run has not ended.
        """
        if not state.is_world_process_zero:
            return
        folder = local_folder(args.output_path)
        try:
            write_report(folder, self._folder or folder, runs=runs, picture=not runs)
        except Exception as error:  # a full disk or a broken matplotlib must not end training
            logger.warning("the report in %s could not be written: %r", self._folder or folder, error)


def write_report(
    run: Path,
    folder: Path,
    *,
    runs: bool | None,
    picture: bool = True,
    others: Sequence[Path] = (),
    describe: Callable[[RunView], Facts] = lambda view: (),
) -> list[Path]:
    """Write the report of a run into `folder`, from the run's files alone, and return what was written.

    Args:
        runs: whether the run goes on if it has no end; None if that is not known.
        picture: also draw `training.png`, if matplotlib is installed.
        others: runs whose curves are drawn over those of this one.
        describe: returns facts of a run that its page shows below its state.

    Raises:
        DataError: the run's files are damaged. OSError: they cannot be read, or the folder cannot be written.
    """
    # Strict: a report that leaves out damaged rows would be taken for that of the whole run.
    view = read_run(run, strict=True)
    view = replace(view, life=replace(view.life, runs=runs))
    title = run.absolute().name
    found = [view, *(read_run(other, strict=True) for other in others)]
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    write_whole(written[0], render_page([summarised(one, describe(one)) for one in found]))
    if picture and is_available("matplotlib"):
        written.append(folder / "training.png")
        draw_training([measured(row) for row in view.all_rows], written[1], title)
    elif picture:
        logger.info(
            "training.png is not written, since matplotlib is not installed; report.html has the curves. Install "
            "it with: %s",
            install_command("matplotlib"),
        )
    return written


def summarised(view: RunView, facts: Facts = ()) -> PageRun:
    """Return a run with one line on its state and its time, as its page shows them."""
    rows = view.all_rows
    return PageRun(view, status(view.record, rows, view.life.runs), training_time(view.record, rows), facts)


def status(record: Record | None, rows: Sequence[Row], runs: bool | None) -> str:
    """Return one line: how the run ended and when, or how far it was when it wrote its last row."""
    step = max((row["step"] for row in rows), default=0)
    last = f"last row at {_clock(rows[-1]['timing']['wall'])}" if rows else "nothing was logged"
    if record is None:
        return f"step {step:,}; {last}"
    if (end := record["end"]) is None:
        state = {True: "running", False: "killed", None: "unknown"}[runs]
        return f"{status_in_words(state, step, record['max_steps'])}; {last}"
    reason = f": {end['reason']}" if end["status"] == "failed" else ""
    return (
        f"{status_in_words(end['status'], end['step'], record['max_steps'])} at {_clock(end['time'])}{reason}"
    )


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def training_time(record: Record | None, rows: Sequence[Row]) -> TrainingTime | None:
    """Return the time of all sessions of a run; None if it is not recorded.

    A session without an end is counted up to its last row, whose `elapsed` are the seconds since it began.
    """
    if record is None:
        return None
    sessions, end = record["sessions"], record["end"]
    trained, step = record["trained"], sessions[-1]["from_step"]
    seconds, samples = trained["seconds"], None
    if end is not None:
        seconds, samples, step = end["trained"]["seconds"], end["trained"]["samples"], end["step"]
    elif rows and rows[-1]["step"] > step:
        seconds, step = seconds + rows[-1]["timing"].get("elapsed", 0.0), rows[-1]["step"]
    return TrainingTime(
        seconds=seconds,
        samples=samples,
        updates=step - trained["from_step"],
        from_step=trained["from_step"],
        sessions=len(sessions),
        repeated=sum(session["repeated"] for session in sessions),
    )


_BLUE, _INK, _LINE = "#2a78d6", "#52514e", "#e1e0d9"
_COLOURS = ("#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#4a3aa7")


def draw_training(history: History, path: Path, title: str) -> None:
    """Write loss, learning rate and gradient norm over the step to `path` (PNG), atomically. Raises
    MissingDependencyError if matplotlib is not installed.
    """
    # Not pyplot, which selects a window backend and keeps figures alive.
    canvas = require("matplotlib.backends.backend_agg", "draw training.png").FigureCanvasAgg
    figure = require("matplotlib.figure", "draw training.png").Figure(figsize=(9, 6), dpi=120)
    # Room for the widest labels: to measure those that there are takes as long as the picture.
    room = {"left": 0.11, "right": 0.98, "bottom": 0.085, "top": 0.9, "hspace": 0.4, "wspace": 0.3}
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), **room)
    loss = figure.add_subplot(grid[0, :])
    _line(loss, "training", curve(history, "loss"), _BLUE)
    for colour, name in zip(itertools.cycle(_COLOURS), evaluation_losses(history), strict=False):
        _line(loss, name, curve(history, name), colour)
    _finish(loss, "Loss", legend=True)
    for place, name, label in (
        (grid[1, 0], "learning_rate", "Learning rate"),
        (grid[1, 1], "grad_norm", "Gradient norm"),
    ):
        axes = figure.add_subplot(place)
        _line(axes, name, curve(history, name), _BLUE)
        _finish(axes, label, legend=False)
    figure.suptitle(_literal(title), x=0.01, ha="left", fontweight="bold")
    picture = io.BytesIO()
    # Not `savefig`, which draws everything twice.
    canvas(figure).print_png(picture)
    write_whole(path, picture.getvalue())


def _line(axes: Any, name: str, points: list[Point], colour: str) -> None:
    if not points:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=_INK)
    else:
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) <= 40 else ""
        axes.plot(steps, values, color=colour, linewidth=1.8, label=_literal(name), marker=marker, ms=4)


def _literal(text: str) -> str:
    """A name as a picture shows it: what stands between two dollar signs would be read as a formula."""
    return one_line(text).replace("$", r"\$")


def _finish(axes: Any, label: str, *, legend: bool) -> None:
    # At a place where nothing is: to look for one takes a quarter of the time of the picture.
    axes.set_title(label, loc="left", fontsize=10, y=1.02)
    finite = [value for line in axes.lines for value in line.get_ydata() if abs(value) < LARGEST]
    if finite:  # matplotlib's own labels may be of any width, and put a factor where the title is
        places = ticks_around(min(finite), max(finite))
        axes.set_yticks(places, labels(places))
    axes.set_xlabel("step", color=_INK)
    axes.grid(axis="y", color=_LINE)
    axes.tick_params(colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if legend and len(axes.lines) > 1:
        axes.legend(frameon=False)
