"""Curves as text, and what charts of a page need: round ticks, few points, short numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

Point = tuple[float, float]
# A point of any number of items.
Logged = TypeVar("Logged", bound=tuple[Any, ...])

# More points cannot be distinguished at the width of a chart, and only make a page larger.
_MAX_POINTS = 400
LARGEST = 1e300  # beyond it the span of an axis could overflow


def text_chart(
    points: Sequence[Point], other: Sequence[Point] = (), width: int = 64, height: int = 10
) -> str:
    """Return a curve over the step as lines of text; empty for fewer than two finite points. Each column is the mean of
    its steps. The points of another curve are drawn as `o`, in the same frame.
    """
    curves = [[point for point in curve if abs(point[1]) < LARGEST] for curve in (points, other)]  # no NaN
    if len(curves[0]) < 2:
        return ""
    steps, values = zip(*curves[0], *curves[1], strict=True)
    left, right = min(steps), max(max(steps), min(steps) + 1)
    low, *_, high = ticks_around(min(values), max(values))
    rows = [[" "] * width for _ in range(height)]
    for curve, mark in zip(curves, "*o", strict=True):
        columns: dict[int, list[float]] = {}
        for step, value in curve:
            columns.setdefault(round((step - left) / (right - left) * (width - 1)), []).append(value)
        for column, found in columns.items():
            share = (sum(found) / len(found) - low) / (high - low)
            rows[round((1 - share) * (height - 1))][column] = mark
    names = labels([high, low])
    margin = max(map(len, names))
    sides = [names[0], *[""] * (height - 2), names[1]]
    lines = [f"{side:>{margin}} |{''.join(row).rstrip()}" for side, row in zip(sides, rows, strict=True)]
    first, last = short(left), f"step {short(right)}"
    foot = [f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  {first}{last:>{width - len(first)}}"]
    return "".join(f"{line}\n" for line in [*lines, *foot])


def ticks_around(low: float, high: float) -> list[float]:
    """Return the ticks of an axis for finite values from `low` to `high`; a constant needs an axis too."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / LARGEST):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    return ticks(low, high)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten apart) that cover `[low, high]`."""
    span = high - low
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Return the values as text, with as many digits as needed to distinguish them."""
    texts: list[str] = []
    for digits in range(4, 16):
        texts = [short(value, digits) for value in values]
        if len(set(texts)) == len(values):
            break
    return texts


def thinned(points: Sequence[Logged], limit: int = _MAX_POINTS) -> Sequence[Logged]:
    """Return at most `limit` of the points, whose second item is their value: the lowest and the highest of each
    stretch, so that spikes stay.
    """
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / (limit // 2))
    kept: list[Logged] = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [place for place in stretch if math.isfinite(points[place][1])] or stretch[:1]
        low = min(finite, key=lambda place: points[place][1])
        high = max(finite, key=lambda place: points[place][1])
        kept += [points[place] for place in sorted({low, high})]
    return kept


def short(value: float, digits: int = 4) -> str:
    """Return a short number: `2,000`, `0.125`, `3e-5`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
