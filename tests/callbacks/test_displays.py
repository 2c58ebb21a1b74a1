"""Bars and lines, with the clock in the test's hand."""

from __future__ import annotations

import gc
import io

import pyte
import pytest

from windlass.callbacks.displays import (
    BarDisplay,
    LineDisplay,
    QuietDisplay,
    RichDisplay,
    clock_text,
    open_display,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (61.9, "1:01"),
        (3600, "1:00:00"),
        (float("inf"), "-:--"),
        (float("nan"), "-:--"),
        (-1, "-:--"),
    ],
)
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_lines_say_how_far_and_how_long() -> None:
    out, clock = io.StringIO(), Clock()
    lines = LineDisplay(100, "train", start=20, file=out, clock=clock)
    clock.now = 30.0
    lines.advance(40)
    lines.write("loss 1.5")
    assert out.getvalue() == "[train 40/100 40% 0:30<1:30] loss 1.5\n"  # 20 steps took 30 s, 60 are left


def test_lines_give_a_sign_of_life_each_minute_only() -> None:
    out, clock = io.StringIO(), Clock()
    lines = LineDisplay(1000, "train", file=out, clock=clock)
    for second in range(1, 200):
        clock.now = float(second)
        lines.advance(second)
    assert [line.split("%")[0] for line in out.getvalue().splitlines()] == [
        "[train 60/1000 6", "[train 120/1000 12", "[train 180/1000 18",
    ]  # fmt: skip
    lines.begin_inner("evaluate", 50)
    clock.now = 260.0
    lines.advance_inner(7)
    lines.end_inner()
    lines.close()
    assert out.getvalue().splitlines()[-1].startswith("[evaluate 7/50")
    assert "\r" not in out.getvalue()


def on_screen(out: Terminal, columns: int = 80) -> list[str]:
    """What a terminal shows that got this text."""
    screen = pyte.Screen(columns, 24)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


def test_a_bar_is_drawn_no_more_often_than_eyes_can_see() -> None:
    out, clock = Terminal(), Clock()
    bar = BarDisplay(1000, "train", file=out, clock=clock)
    for step in range(1, 1001):
        clock.now = step / 1000
        bar.advance(step)
    assert 5 <= out.getvalue().count("train") <= 7
    bar.close()
    assert on_screen(out)[0].startswith("train 1000/1000 100%")
    assert out.getvalue().endswith("#\n")


@pytest.mark.parametrize("kind", [BarDisplay, RichDisplay])
def test_messages_are_above_the_bars(kind: type[BarDisplay]) -> None:
    if kind is RichDisplay:
        pytest.importorskip("rich")
    out = Terminal()
    bar = kind(10, "train", file=out, clock=Clock())
    bar.write("loss [bold]1.5")
    bar.begin_inner("evaluate", 4)
    bar.advance(7)
    seen = on_screen(out)
    assert seen[:2] == ["step 0  loss [bold]1.5", ""]  # not read as markup
    assert [row.split("/")[0] for row in seen[2:]] == ["train 0", "evaluate 0"]
    bar.end_inner()
    bar.write("loss 1.2")
    assert [row.split("/")[0] for row in on_screen(out)[1:]] == ["step 7  loss 1.2", "", "train 7"]
    bar.close()
    assert [row.split("/")[0] for row in on_screen(out)[1:]] == ["step 7  loss 1.2", "train 7"]


@pytest.mark.parametrize("kind", [BarDisplay, RichDisplay])
@pytest.mark.parametrize("columns", [20, 30, 80, 200])
def test_a_bar_fits_on_its_row(kind: type[BarDisplay], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is RichDisplay:
        pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    bar = kind(10, "train", file=out, clock=Clock())
    bar.advance(12)
    bar.write(*(f"name{number} {number}" for number in range(20)))
    bar.close()
    seen = on_screen(out, columns)
    assert seen[-1].startswith("train 12/")
    assert max(map(len, seen)) < columns
    assert " ".join(seen[:-1]).split()[2:] == [word for n in range(20) for word in (f"name{n}", str(n))]
    assert all(line.startswith("  name") for line in seen[1:-1])


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(1, "train", file=Terminal()), LineDisplay)


def test_a_process_without_a_display_of_its_own_shows_nothing() -> None:
    out = io.StringIO()
    display = open_display(10, "train", file=out, drawn=False)
    assert isinstance(display, QuietDisplay)
    display.advance(10)
    display.begin_inner("evaluate", 4)
    display.write("loss 1.5")
    display.close()
    assert out.getvalue() == ""


@pytest.mark.parametrize("make", [BarDisplay, LineDisplay])
def test_unknown_length_is_no_division_by_zero(make: type) -> None:
    out = Terminal()
    display = make(0, "train", file=out)
    display.advance(3)
    display.write("x")
    display.close()
    assert "train 3/0" in out.getvalue()


def test_a_bar_left_open_is_put_away_when_it_is_dropped() -> None:
    out = Terminal()
    display = BarDisplay(10, "train", file=out)
    assert on_screen(out)[0] == ""
    del display
    gc.collect()
    assert on_screen(out)[0].startswith("train 0/10")


def test_the_file_decides() -> None:
    assert isinstance(open_display(1, "train", file=io.StringIO()), LineDisplay)
    display = open_display(1, "train", file=Terminal())
    assert isinstance(display, RichDisplay | BarDisplay)
    display.close()


def test_without_rich_a_terminal_gets_the_plain_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(open_display(1, "train", file=Terminal()), BarDisplay)
