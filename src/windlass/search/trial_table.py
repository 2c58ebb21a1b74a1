"""The trials of a study as a table, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.core.optional import is_available
from windlass.search.study import Record, Study


def trials_in_words(study: Study) -> str:
    """Return a table of all trials; the best are marked."""
    names = list(dict.fromkeys(name for record in study.trials for name in record.params))
    best = {record.number for record in study.best()}
    head = ["trial", "state", *(["objective"] * len(study.directions)), *names]
    rows = [
        head,
        *(_cells(record, names, record.number in best, len(study.directions)) for record in study.trials),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(record: Record, names: list[str], is_best: bool, objectives: int) -> list[str]:
    values = [short(value) for value in record.values] or ["-"] * objectives
    state = "best" if is_best else f"{record.state} {record.reason}".strip()[:40]
    return [str(record.number), state, *values, *(short(record.params.get(name, "-")) for name in names)]


def short(value: Any) -> str:
    """Return a value with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_trials(study: Study, path: Path) -> bool:
    """Draw the objective against each hyperparameter that has numbers; return False without matplotlib or trials."""
    complete = [record for record in study.trials if record.state == "complete"]
    names = [
        name for name in dict.fromkeys(n for r in complete for n in r.params) if _is_numeric(complete, name)
    ]
    if not complete or not names or not is_available("matplotlib"):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(names), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    best = {record.number for record in study.best()}
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), place)
        values = [record.params[name] for record in complete]
        colours = ["tab:orange" if record.number in best else "tab:blue" for record in complete]
        axes.scatter(values, [record.values[0] for record in complete], c=colours)
        for record, value in zip(complete, values, strict=True):
            axes.annotate(
                str(record.number), (value, record.values[0]), textcoords="offset points", xytext=(4, 4)
            )
        if min(values) > 0 and max(values) / min(values) > 20:
            axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.set_ylabel("objective" if place == 1 else "")
    figure.savefig(path, dpi=120)
    return True


def _is_numeric(records: list[Record], name: str) -> bool:
    values = [record.params.get(name) for record in records]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
