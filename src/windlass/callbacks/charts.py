"""Line charts as inline SVG, without scripts or network, for light and dark pages; and as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from windlass.core.output import in_html

Point = tuple[float, float]
# A point of any number of items.
Logged = TypeVar("Logged", bound=tuple[Any, ...])

# The style sheet of `line_chart`; each rule ends its line, and colours are variables of the page.
CHART_STYLE = """\
figcaption {
  font-weight: 600; display: flex; flex-wrap: wrap; gap: 4px 16px;
  justify-content: space-between; margin-bottom: 6px;
}
.legend { font-weight: 400; font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 4px 14px; }
.key::before {
  content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: middle; background: var(--c);
}
svg { display: block; width: 100%; height: auto; font-size: 11.5px; }
svg text { fill: var(--faint); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.axis { stroke: var(--axis); }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.spot { fill: transparent; }
.spot:hover { fill: var(--c); }
.s0 { --c: var(--c0); }
.s1 { --c: var(--c1); }
.s2 { --c: var(--c2); }
.s3 { --c: var(--c3); }
.s4 { --c: var(--c4); }
.s5 { --c: var(--c5); }
"""

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 34
# More points cannot be distinguished at the width of the chart, and only make the page larger.
_MAX_POINTS = 400
_DOTS_UP_TO = 40
_LARGEST = 1e300  # beyond it the span of an axis could overflow


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: `(step, value)` pairs in order of step. Non-finite values are gaps."""

    name: str
    points: Sequence[Point]


def line_chart(title: str, series: Sequence[Series]) -> str:
    """Return a `<figure>` with one line per series over the step; empty if no series has a finite point."""
    drawn = [(index, s) for index, s in enumerate(series) if any(map(_is_finite, s.points))]
    if not drawn:
        return ""
    finite = [p for _, s in drawn for p in s.points if _is_finite(p)]
    frame = _Frame.around(finite)
    curves = "".join(_curve(frame, s, index) for index, s in drawn)
    legend = "".join(f'<span class="key s{index % 6}">{in_html(s.name)}</span>' for index, s in drawn)
    gaps = sum(len(s.points) for _, s in drawn) - len(finite)
    note = f'<span class="muted">{gaps} non-finite left out</span>' if gaps else ""
    name = in_html(title)
    return (
        f'<figure class="card"><figcaption>{name}<span class="legend">{legend if len(drawn) > 1 else ""}{note}'
        f'</span></figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} over steps">'
        f"{frame.axes()}{curves}</svg></figure>\n"
    )


def text_chart(points: Sequence[Point], width: int = 64, height: int = 10) -> str:
    """Return a curve as lines of text; empty for fewer than two finite points. Each column is the mean of its steps."""
    finite = [p for p in points if _is_finite(p)]
    if len(finite) < 2:
        return ""
    frame = _Frame.around(finite)
    (left, right), low, high = frame.x_span, frame.y_ticks[0], frame.y_ticks[-1]
    columns: dict[int, list[float]] = {}
    for x, y in finite:
        columns.setdefault(round((x - left) / (right - left) * (width - 1)), []).append(y)
    rows = [[" "] * width for _ in range(height)]
    for column, values in columns.items():
        share = (sum(values) / len(values) - low) / (high - low)
        rows[round((1 - share) * (height - 1))][column] = "*"
    names = labels([high, low])
    margin = max(map(len, names))
    sides = [names[0], *[""] * (height - 2), names[1]]
    lines = [f"{side:>{margin}} |{''.join(row).rstrip()}" for side, row in zip(sides, rows, strict=True)]
    first, last = short(finite[0][0]), f"step {short(finite[-1][0])}"
    foot = [f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  {first}{last:>{width - len(first)}}"]
    return "".join(f"{line}\n" for line in [*lines, *foot])


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


@dataclass(frozen=True, slots=True)
class _Frame:
    """The axes, and the mapping from data to the drawing."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_span: tuple[float, float]

    @classmethod
    def around(cls, points: Sequence[Point]) -> _Frame:
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        low, high = min(ys), max(ys)
        # A constant needs an axis too.
        if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / _LARGEST):
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        left, right = min(xs), max(xs)
        if left == right:
            left, right = left - 1.0, right + 1.0
        inside = [x for x in ticks(left, right, 8) if left <= x <= right and x == int(x)]
        return cls(inside, ticks(low, high), (left, right))

    def x(self, value: float) -> float:
        left, right = self.x_span
        return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for value, label in zip(self.y_ticks, labels(self.y_ticks), strict=True):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts += (
            f'<text x="{self.x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
            for value, label in zip(self.x_ticks, labels(self.x_ticks), strict=True)
        )
        parts.append(f'<text x="{right}" y="{_HEIGHT - 3}" text-anchor="end" class="muted">step</text>')
        return "".join(parts)


def _curve(frame: _Frame, series: Series, index: int) -> str:
    points = thinned(series.points)
    paths = "".join(
        f'<polyline points="{" ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in run)}"/>'
        for run in _unbroken(points)
    )
    finite = [p for p in points if _is_finite(p)]
    # Spots are invisible and only carry the hover text.
    kind, radius = ("dot", 3.5) if len(finite) <= _DOTS_UP_TO else ("spot", 6)
    dots = "".join(
        f'<circle class="{kind}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}">'
        f"<title>{in_html(series.name)}: {short(y, 6)} at step {x:g}</title></circle>"
        for x, y in finite
    )
    return f'<g class="s{index % 6}">{paths}{dots}</g>'


def _unbroken(points: Iterable[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if _is_finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _is_finite(point: Point) -> bool:
    return abs(point[1]) < _LARGEST  # false for NaN


def short(value: float, digits: int = 4) -> str:
    """Return a short number: `2,000`, `0.125`, `3e-5`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
