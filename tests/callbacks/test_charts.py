"""Line charts as SVG and as text."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.charts import Series, labels, line_chart, short, text_chart, thinned, ticks


def parse(chart: str) -> ET.Element:
    return ET.fromstring(chart)


def drawn(chart: str) -> list[list[tuple[float, float]]]:
    """The vertices of every line, in pixels."""
    return [
        [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]  # type: ignore[misc]
        for line in parse(chart).iter("polyline")
    ]


def test_nothing_to_draw_is_nothing() -> None:
    assert line_chart("Loss", []) == ""
    assert line_chart("Loss", [Series("loss", []), Series("nan", [(1, math.nan)])]) == ""


def test_a_line_goes_where_its_values_go() -> None:
    chart = line_chart("Loss", [Series("loss", [(0, 0.0), (50, 1.0), (100, 0.5)])])
    ((x0, y0), (x1, y1), (x2, y2)) = drawn(chart)[0]
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2)  # pixels are rounded to tenths
    assert y1 < y2 < y0  # upwards is less in SVG


def test_a_gap_where_a_value_is_not_finite() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, math.inf), (6, 1.0), (7, 1.5)]
    chart = line_chart("Loss", [Series("loss", points)])
    assert [len(line) for line in drawn(chart)] == [2, 2]
    assert "2 non-finite left out" in chart
    assert len(list(parse(chart).iter("circle"))) == 5  # the lonely point too


def test_a_legend_only_where_there_are_several() -> None:
    one = Series("first", [(1, 1.0), (2, 2.0)])
    assert 'class="key' not in line_chart("Loss", [one])
    both = line_chart("Loss", [one, Series("second", [(1, 3.0)])])
    assert re.findall(r'class="key (s\d)">(\w+)<', both) == [("s0", "first"), ("s1", "second")]


def test_names_are_escaped() -> None:
    chart = line_chart("<b>&", [Series("<script>", [(1, 1.0)]), Series('"x"', [(1, 2.0)])])
    assert "<script>" not in chart
    assert parse(chart).find("figcaption").text == "<b>&"  # type: ignore[union-attr]


VALUES = st.floats(allow_nan=True, allow_infinity=True)


@given(values=st.lists(VALUES, max_size=60), start=st.integers(0, 10**9))
def test_any_values_give_a_drawing_inside_its_frame(values: list[float], start: int) -> None:
    chart = line_chart("any", [Series("any", [(start + i, v) for i, v in enumerate(values)])])
    if not chart:
        assert not any(abs(v) < 1e300 for v in values)
        return
    for line in drawn(chart):
        for x, y in line:
            assert 0 <= x <= 560
            assert 0 <= y <= 250
    for text in parse(chart).iter("text"):
        assert text.text


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
