"""The trials of a study as a table, and as a picture."""

from __future__ import annotations

import html
import math
from typing import Any

from windlass.search.study import Record, Study

_WIDTH, _HEIGHT = 300, 260


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


def draw_trials(study: Study) -> str | None:
    """Return an SVG of the first objective against each hyperparameter that has numbers; None without any."""
    complete = [record for record in study.trials if record.state == "complete"]
    names = [
        name for name in dict.fromkeys(n for r in complete for n in r.params) if _is_numeric(complete, name)
    ]
    if not names:
        return None
    best = {record.number for record in study.best()}
    panels = [_panel(complete, name, best, place * _WIDTH) for place, name in enumerate(names)]
    width, style = len(names) * _WIDTH, "text{font:12px sans-serif}rect{fill:none;stroke:#999}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}"><style>{style}</style>'
    )
    return "\n".join([head, f'<path fill="#fff" d="M0 0H{width}V{_HEIGHT}H0z"/>', *panels, "</svg>"])


def _panel(records: list[Record], name: str, best: set[int], left: float) -> str:
    """Return the points of one hyperparameter, each with the number of its trial."""
    values = [float(record.params[name]) for record in records]
    is_log = min(values) > 0 and max(values) > 20 * min(values)
    across = _scaled(
        [math.log(value) for value in values] if is_log else values, left + 30, left + _WIDTH - 30
    )
    up = _scaled([record.values[0] for record in records], _HEIGHT - 60, 30)
    points = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"#d55e00" if record.number in best else "#0072b2"}"/>'
        f'<text x="{x + 6:.1f}" y="{y - 5:.1f}">{record.number}</text>'
        for record, x, y in zip(records, across, up, strict=True)
    ]
    scale = f"{html.escape(name)}{', logarithmic' if is_log else ''}: {short(min(values))} to {short(max(values))}"
    lowest, highest = min(r.values[0] for r in records), max(r.values[0] for r in records)
    frame = f'<rect x="{left + 15}" y="15" width="{_WIDTH - 30}" height="{_HEIGHT - 60}"/>'
    words = [
        f'<text x="{left + 15}" y="{_HEIGHT - 28}">{scale}</text>',
        f'<text x="{left + 15}" y="{_HEIGHT - 10}">objective {short(lowest)} to {short(highest)}</text>',
    ]
    return "\n".join([frame, *points, *words])


def _scaled(values: list[float], first: float, last: float) -> list[float]:
    low, high = min(values), max(values)
    return [
        first + (last - first) * ((value - low) / (high - low) if high > low else 0.5) for value in values
    ]


def _is_numeric(records: list[Record], name: str) -> bool:
    values = [record.params.get(name) for record in records]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
