"""`training.png`: the curves of a run as one picture, drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

from windlass.callbacks.charts import Point
from windlass.callbacks.report_page import History, curve, evaluation_losses
from windlass.core.optional import require
from windlass.core.whole_file import write_whole

_BLUE, _INK, _LINE = "#2a78d6", "#52514e", "#e1e0d9"
_COLOURS = ("#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#4a3aa7")


def draw_training(history: History, path: Path, title: str) -> None:
    """Write loss, learning rate and gradient norm over the step to `path` (PNG), atomically. Raises
    MissingDependencyError if matplotlib is not installed.
    """
    # Not pyplot, which selects a window backend and keeps figures alive.
    module = require("matplotlib.figure", "draw training.png")
    figure = module.Figure(figsize=(9, 6), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
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
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def _line(axes: Any, name: str, points: list[Point], colour: str) -> None:
    if not points:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=_INK)
    else:
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) <= 40 else ""
        axes.plot(steps, values, color=colour, linewidth=1.8, label=name, marker=marker, ms=4)


def _finish(axes: Any, label: str, *, legend: bool) -> None:
    axes.set_title(label, loc="left", fontsize=10)
    axes.set_xlabel("step", color=_INK)
    axes.grid(axis="y", color=_LINE)
    axes.tick_params(colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if legend and len(axes.lines) > 1:
        axes.legend(frameon=False)
