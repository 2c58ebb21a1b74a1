"""Curves as text, and the parts of charts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.charts import labels, short, text_chart, thinned, ticks

VALUES = st.floats(allow_nan=True, allow_infinity=True)


@given(values=st.lists(VALUES, max_size=60), other=st.lists(VALUES, max_size=5), start=st.integers(0, 10**9))
def test_any_values_give_a_drawing_inside_its_frame(
    values: list[float], other: list[float], start: int
) -> None:
    chart = text_chart(*([(start + i, v) for i, v in enumerate(curve)] for curve in (values, other)))
    finite = sum(abs(v) < 1e300 for v in values)
    assert bool(chart) == (finite > 1)
    assert len(chart.splitlines()) in (0, 12)
    assert all(len(line.partition("|")[2]) <= 64 for line in chart.splitlines())


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-3, 1e9), count=st.integers(2, 10))
def test_ticks_are_round_and_cover_the_span(low: float, span: float, count: int) -> None:
    found = ticks(low, low + span, count)
    step = found[1] - found[0]
    assert found[0] <= low + step * 1e-6
    assert found[-1] >= low + span - step * 1e-6
    assert len(found) <= count + 2
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 3) in (1, 2, 5, 10)


def test_labels_tell_neighbours_apart() -> None:
    assert labels([0.5, 1.0]) == ["0.5", "1"]
    assert labels([0.98761, 0.98762]) == ["0.98761", "0.98762"]
    assert labels([]) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=401, max_size=5000))
def test_thinning_keeps_every_extreme(values: list[float]) -> None:
    points = [(float(i), v, None) for i, v in enumerate(values)]  # a page's points have further items
    kept = thinned(points)
    assert len(kept) <= 400
    assert list(kept) == sorted(kept)
    assert {min(values), max(values)} <= {y for _, y, _ in kept}
    assert set(kept) <= set(points)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (2000, "2,000"), (0.125, "0.125"), (3e-5, "3e-5"), (1.5e15, "1.5e15"), (-0.0, "0"),
        (math.nan, "NaN"), (math.inf, "inf"), (-12345.678, "-1.235e4"), (1e10, "1e10"),
    ],
)  # fmt: skip
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_a_curve_as_text_falls_from_the_top_left_to_the_bottom_right() -> None:
    drawn = text_chart([(step, 10.0 - step) for step in range(1, 11)], width=10, height=5)
    rows = [line.partition("|")[2] for line in drawn.splitlines() if "|" in line]
    places = sorted((row.index("*"), number) for number, row in enumerate(rows) if "*" in row)
    assert [number for _, number in places] == sorted(number for _, number in places)
    assert drawn.count("*") == 10
    assert drawn.splitlines()[-1].split() == ["1", "step", "10"]


def test_a_curve_as_text_needs_two_finite_points() -> None:
    assert text_chart([(1.0, 2.0), (2.0, math.nan)]) == ""
    assert text_chart([(1.0, 2.0), (2.0, 2.0)]).count("*") == 2  # a constant


def test_another_curve_is_drawn_in_the_same_frame() -> None:
    drawn = text_chart([(1.0, 1.0), (3.0, 3.0)], [(2.0, 2.0), (4.0, math.nan)], width=9, height=3)
    assert [line.partition("|")[2] for line in drawn.splitlines() if "|" in line] == [
        "        *",
        "    o",
        "*",
    ]
