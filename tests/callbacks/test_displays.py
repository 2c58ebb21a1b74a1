"""Bars and lines, with the clock in the test's hand."""

from __future__ import annotations

import gc
import io
import re

import pytest

from windlass.callbacks.displays import BarDisplay, LineDisplay, RichDisplay, clock_text, open_display


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


def test_plain_bar_is_drawn_no_more_often_than_eyes_can_see() -> None:
    out, clock = Terminal(), Clock()
    bar = BarDisplay(1000, "train", file=out, clock=clock)
    for step in range(1, 1001):
        clock.now = step / 1000
        bar.advance(step)
    drawn = out.getvalue().count("\r")
    assert 5 <= drawn <= 7
    bar.close()
    assert "train 1000/1000 100%" in out.getvalue().split("\r")[-1]
    assert out.getvalue().endswith("\n")


def test_plain_bar_keeps_messages_above_itself() -> None:
    out = Terminal()
    bar = BarDisplay(10, "train", file=out, clock=Clock())
    bar.write("loss 1.5")
    bar.begin_inner("evaluate", 4)
    bar.advance_inner(2)
    bar.end_inner()
    assert "\r\x1b[2Kloss 1.5\n\r" in out.getvalue()
    assert "train 0/10" in out.getvalue().split("\r")[-1]


@pytest.mark.parametrize("make", [BarDisplay, LineDisplay])
def test_unknown_length_is_no_division_by_zero(make: type) -> None:
    out = Terminal()
    display = make(0, "train", file=out)
    display.advance(3)
    display.write("x")
    display.close()
    assert "train 3/0" in out.getvalue()


def test_rich_bar_shows_both_counts_and_the_messages() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    display = RichDisplay(10, "train", file=out)
    display.advance(4)
    display.write("loss [bold]1.5")
    display.begin_inner("evaluate", 6)
    display.advance_inner(6)
    display.end_inner()
    display.advance(10)
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "loss [bold]1.5" in text  # not read as markup
    assert "evaluate" in text
    assert "10/10" in text.splitlines()[-1]


def test_a_bar_left_open_is_put_away_when_it_is_dropped() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    display = RichDisplay(10, "train", file=out)
    assert "\x1b[?25l" in out.getvalue()  # the cursor is hidden
    del display
    gc.collect()
    assert out.getvalue().endswith("\x1b[?25h")


def test_the_file_decides() -> None:
    assert isinstance(open_display(1, "train", file=io.StringIO()), LineDisplay)
    display = open_display(1, "train", file=Terminal())
    assert isinstance(display, RichDisplay | BarDisplay)
    display.close()


def test_without_rich_a_terminal_gets_the_plain_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(open_display(1, "train", file=Terminal()), BarDisplay)
