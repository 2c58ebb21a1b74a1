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


def test_lines_say_how_far_and_how_long() -> None:
    out, clock = io.StringIO(), Clock()
    lines = LineDisplay(100, "train", start=20, file=out, clock=clock)
    clock.now = 30.0
    lines.advance(40)
    lines.report({"loss": 1.5, "grad_norm": 2}, 100)
    assert (
        out.getvalue() == "[train 40/100 40% 0:30<1:30] loss 1.50  grad_norm 2\n"
    )  # 20 steps took 30 s, 60 are left


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
    assert on_screen(out)[0].endswith("#  took 0:01")


def test_messages_are_above_the_bars() -> None:
    out = Terminal()
    bar = BarDisplay(10, "train", file=out, clock=Clock())
    bar.write("note [bold]1.5")
    bar.begin_inner("evaluate", 4)
    bar.advance(7)
    seen = on_screen(out)
    assert seen[:2] == ["      note [bold]1.5", ""]
    assert [row.split("/")[0] for row in seen[2:]] == ["train  0", "evaluate 0"]
    bar.end_inner()
    bar.report({"eval_loss": 1.2}, 100)
    assert [row.split("/")[0] for row in on_screen(out)[1:]] == ["   7  eval_loss 1.20", "", "train  7"]
    bar.report({"loss": 1.5, "overflowed": True}, 100)
    assert "      overflowed True" in on_screen(out)
    bar.close()
    assert [row.split("/")[0] for row in on_screen(out)[1:]][-2:] == ["      overflowed True", "train  7"]


@pytest.mark.parametrize("columns", [20, 30, 80, 200])
def test_rows_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    bar = BarDisplay(10, "train", file=out, clock=Clock())
    bar.advance(8)
    bar.report({"loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": 1.0}, 100)
    bar.report({f"name{number}": number for number in range(20)}, 100)
    bar.close()
    seen = on_screen(out, columns)
    assert seen[-1].startswith("train  8/")
    assert max(map(len, seen)) < columns
    event = seen[seen.index(next(line for line in seen if "name0" in line)) : -1]
    assert " ".join(event).split()[1:] == [word for n in range(20) for word in (f"name{n}", str(n))]
    assert all(line.startswith("      name") for line in event[1:])
    assert any("1.50" in line for line in seen)


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        (66, []), (65, ["samples/s"]), (51, ["samples/s"]), (50, ["samples/s", "loss"]), (39, ["samples/s", "loss"]),
        (38, ["samples/s", "loss", "left"]),
    ],
)  # fmt: skip
def test_a_narrow_row_keeps_what_matters_most(
    columns: int, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, clock = Terminal(), Clock()
    bar = BarDisplay(100, "train", file=out, clock=clock)
    bar.count("samples", 0)
    clock.now = 10.0
    bar.count("samples", 4310)
    bar.report({"loss": 0.2093}, 100)
    bar.advance(40)
    row = on_screen(out, columns)[-1]
    facts = {"left": "0:15 left", "loss": "loss 0.209", "samples/s": "431 samples/s"}
    assert row.startswith("train  40/100  40% ###")
    for name, fact in facts.items():
        assert (fact in row) == (name not in left_out), row


def test_the_speed_leaves_evaluations_out() -> None:
    out, clock = io.StringIO(), Clock()
    lines = LineDisplay(100, "train", file=out, clock=clock)
    lines.count("tokens", 1000)
    clock.now = 10.0
    lines.begin_inner("evaluate", 4)
    clock.now = 30.0
    lines.end_inner()
    lines.count("tokens", 185_000)
    lines.report({"loss": 1.0}, 100)
    assert out.getvalue().endswith("] loss 1.00  18.4k tokens/s\n")


def test_a_speed_is_unknown_until_two_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lines = LineDisplay(100, "train", file=out, clock=Clock())
    lines.count("tokens", 1000)  # of a resumed run: of all its tokens
    lines.count("tokens", 2000)  # no time passed
    lines.report({"loss": 1.0}, 100)
    assert out.getvalue().endswith("] loss 1.00\n")


def test_a_bar_has_colours_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for wanted in (True, False):
        monkeypatch.setenv("NO_COLOR", "" if wanted else "1")
        out = Terminal()
        bar = BarDisplay(2, "train", file=out, clock=Clock())
        bar.advance(1)
        bar.close()
        seen[wanted] = "\x1b[36m" in out.getvalue()
    assert seen == {True: True, False: False}


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
    assert on_screen(out)[0].startswith("train  0/10")


def test_the_file_decides() -> None:
    assert isinstance(open_display(1, "train", file=io.StringIO()), LineDisplay)
    display = open_display(1, "train", file=Terminal())
    assert isinstance(display, BarDisplay)
    display.close()
