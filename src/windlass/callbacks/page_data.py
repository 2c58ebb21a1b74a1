"""The numbers of a run for the charts of its page: few enough to send, and each of them as it was logged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.callbacks.charts import LARGEST, thinned
from windlass.callbacks.rows import Row, described_event, is_number
from windlass.callbacks.run_view import RunView
from windlass.config.sections.fields import OptimisationSection
from windlass.core.output import shown

# At most so many points of a series, and of all series together: the page stays below a megabyte.
MOST_POINTS, _ALL_POINTS, _FEWEST = 2000, 16_000, 100
_KEPT_POINTS = 4000  # of a series whose rows are added one by one
_MOST_MARKS = 500
_TOKENS = ("num_input_tokens_seen", "num_tokens")
_NOT_SERIES = {"step", "epoch", "total_flos", "slowest_rank", "wall", "elapsed", *_TOKENS}
_NUMBERS = frozenset({float, int})
_NORM = OptimisationSection.max_grad_norm

Point = tuple[float, float, float, float | None]  # step, value, seconds since the first start, tokens


def page_data(view: RunView) -> dict[str, Any]:
    """Return the data of a run for the page, as plain JSON values.

    `series` has, for each metric, columns in the order of the rows: `s` steps, `v` values, `t` seconds since the first
    start, `k` tokens (null if they are not counted), `bad`: how many values are not finite, which are left out, and
    `of`: how many there are. `clip` has the largest norm that is not clipped, and how many norms were above it.
    """
    curves = Curves()
    curves.add(view, view.all_rows)
    return whole_data(view, curves)


def whole_data(view: RunView, curves: Curves) -> dict[str, Any]:
    """Return the data of a run whose rows were added to `curves`; `view` may have few of them."""
    return {"name": shown(view.name), "began": _began(view), **curves.as_data(), **page_events(view)}


class Curves:
    """The curves of a run, to which rows are added as they are logged. Of a long one few points are kept.

    Args:
        tokens: that were counted before the first row.

    Attributes:
        tokens: that were counted up to the last row; None if they are not counted.
    """

    def __init__(self, tokens: float | None = None) -> None:
        self.tokens = tokens
        self._points: dict[str, list[Point]] = {}
        self._bad: dict[str, int] = {}
        self._norms = 0  # that were reported
        self._limit = 0.0  # the largest norm of the last attempt; 0: norms are not clipped
        self._over = 0  # norms above that of their attempt

    def add(self, view: RunView, rows: Sequence[Row]) -> None:
        series = _series(rows, _began(view), self.tokens)
        for name, (points, bad) in series.items():
            kept = self._points.setdefault(name, [])
            kept += points
            self._bad[name] = self._bad.get(name, 0) + bad
            if len(kept) > 2 * _KEPT_POINTS:
                self._points[name] = list(thinned(kept, _KEPT_POINTS))
        limits = _largest_norms(view)
        self._limit = limits[-1][1]
        norms, _ = series.get("grad_norm", ([], 0))
        self._norms += len(norms)
        self._over += _clipped(norms, limits, _began(view))
        counted = (tokens_of(row) for row in reversed(rows))
        self.tokens = next((found for found in counted if found is not None), self.tokens)

    def as_data(self) -> dict[str, Any]:
        """Return `series` and `clip` of `page_data`."""
        limit = max(_FEWEST, min(MOST_POINTS, _ALL_POINTS // max(len(self._points), 1)))
        series = {
            shown(name): _columns(points, self._bad[name], limit) for name, points in self._points.items()
        }
        clip = {"at": self._limit, "over": self._over, "of": self._norms}
        return {"series": series, "clip": clip if self._limit and self._norms else None}


def page_events(view: RunView) -> dict[str, Any]:
    """Return the attempts of a run, and what happened once."""
    began = _began(view)
    return {
        "attempts": [
            {
                "number": one.number,
                "from": one.from_step,
                "to": one.step,
                "t0": round(one.began - began, 2),
                "t1": None if one.ended is None else round(one.ended - began, 2),
                "status": one.status,
            }
            for one in view.attempts
        ],
        "marks": list(_marks(view, began))[-_MOST_MARKS:],
    }


def tokens_of(row: Row) -> float | None:
    """Return the tokens that were counted up to a row; None if it does not have them."""
    counts = (row[name] for name in _TOKENS if is_number(row.get(name)))
    return next((float(count) for count in counts if math.isfinite(count)), None)


def _began(view: RunView) -> float:
    if view.attempts:
        return view.attempts[0].began
    return float(view.all_rows[0]["timing"]["wall"]) if view.all_rows else 0.0


def _series(rows: Sequence[Row], began: float, tokens: float | None) -> dict[str, tuple[list[Point], int]]:
    found: dict[str, list[Point]] = {}
    bad: dict[str, int] = {}
    for row in rows:
        if row.get("event") == "summary" or described_event(row) is not None:
            continue
        step, timing = row["step"], row["timing"]
        seconds = timing["wall"] - began
        counted = tokens_of(row)
        tokens = tokens if counted is None else counted
        for values in (row, timing):
            for name, value in values.items():
                # Exact types first: this is done for each value of a long run. True and False are no numbers.
                if type(value) not in _NUMBERS or name in _NOT_SERIES:
                    continue
                if -LARGEST < value < LARGEST:  # false for NaN
                    if name in found:
                        found[name].append((step, value, seconds, tokens))
                    else:
                        found[name] = [(step, value, seconds, tokens)]
                else:
                    bad[name] = bad.get(name, 0) + 1
    return {name: (found.get(name, []), bad.get(name, 0)) for name in dict.fromkeys([*found, *bad])}


def _clipped(norms: Sequence[Point], limits: Sequence[tuple[float, float]], began: float) -> int:
    """How many reported norms were above that of their attempt; `limits` are those of `_largest_norms`."""
    over, place = 0, 0
    for _, norm, seconds, _ in norms:
        while place + 1 < len(limits) and limits[place + 1][0] - began <= seconds:
            place += 1
        over += norm > (limits[place][1] or math.inf)
    return over


def _largest_norms(view: RunView) -> list[tuple[float, float]]:
    """(when it began, `max_grad_norm`) of each attempt; 0: norms are not clipped."""
    limit = view.arguments.get("max_grad_norm", _NORM)
    found = []
    for attempt in reversed(view.attempts):
        found.append((attempt.began, _norm(limit)))
        before = attempt.changed.get("max_grad_norm")
        if isinstance(before, list) and before:
            limit = _NORM if before[0] is None else before[0]
    return found[::-1] or [(0.0, _norm(limit))]


def _norm(limit: Any) -> float:
    """A `max_grad_norm`; 0 for one that clips nothing, as an infinite one."""
    return float(limit) if is_number(limit) and math.isfinite(limit) else 0.0


def _columns(points: Sequence[Point], bad: int, limit: int) -> dict[str, Any]:
    kept = thinned(points, limit)
    return {
        "s": [point[0] for point in kept],
        "v": [point[1] for point in kept],
        "t": [round(point[2], 2) for point in kept],
        "k": [point[3] for point in kept] if any(point[3] is not None for point in kept) else None,
        "bad": bad,
    }


def _marks(view: RunView, began: float) -> Iterator[Mapping[str, Any]]:
    marks = [(event.kind, event.step, event.wall, event.text) for event in view.events]
    marks += [
        ("evaluation", row["step"], row["timing"]["wall"], f"evaluated at step {row['step']:,}")
        for row in view.evaluations
    ]
    for one in view.checkpoints:
        if one.saved_at is not None:
            kind = "damaged" if one.problem else "best" if one.is_best else "save"
            marks.append((kind, one.step, one.saved_at, one.problem or f"saved {one.path.name}"))
    for attempt in view.attempts[1:]:
        text = f"attempt {attempt.number} began at step {attempt.from_step:,}"
        marks.append(("restart", attempt.from_step, attempt.began, text))
    for kind, step, wall, text in sorted(marks, key=lambda mark: mark[2]):
        yield {"kind": kind, "step": step, "t": round(wall - began, 2), "text": shown(text)}
