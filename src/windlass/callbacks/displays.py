"""Displays of progress: a bar on a terminal, lines of text, or nothing, all with the same methods."""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from windlass.callbacks.log_table import LogTable, clock_text, short_number, words_of
from windlass.callbacks.rows import Metrics, is_number
from windlass.core.activity import Ticking
from windlass.core.output import STDOUT, TolerantStream, shown
from windlass.core.terminal import Foot, can_redraw, foot_of, row_width

Clock = Callable[[], float]
_LEAST_BAR = 8  # columns; a shorter bar shows nothing


def open_display(
    total: int, label: str, *, start: int = 0, file: TextIO | None = None, drawn: bool = True
) -> Display:
    """Return the best display for `file` (default: standard output).

    A terminal gets a bar; anything else gets whole lines without carriage returns.

    Args:
        total: steps of the run.
        start: steps already done, when resumed.
        drawn: False in a process that leaves the display to another one.
    """
    stream = file or sys.stdout
    if not drawn:
        return QuietDisplay(stream)
    if can_redraw(stream):
        return BarDisplay(total, label, start=start, file=stream)
    return LineDisplay(total, label, start=start, file=TolerantStream(file) if file else STDOUT)


class Pace:
    """The progress of a run, its duration, and an estimate of the time left."""

    def __init__(self, total: int, label: str, start: int, clock: Clock) -> None:
        self.total = total
        self.label = label
        self.step = self._first = start
        self._clock = clock
        self._began = clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float:
        done = self.step - self._first
        return self.elapsed / done * (self.total - self.step) if done > 0 else float("inf")

    @property
    def has_moved(self) -> bool:
        return self.step != self._first

    def position(self) -> str:
        """Return for example `train  40/100  40%`, equally long for the whole run."""
        width = len(str(self.total))
        share = f" {self.step / self.total:>4.0%}" if self.total > 0 else ""
        return f"{self.label} {self.step:>{width}}/{self.total}{share}"

    def text(self) -> str:
        """Return for example `train 40/100 40% 0:12<0:18`: done, share, elapsed, left."""
        return f"{' '.join(self.position().split())} {clock_text(self.elapsed)}<{clock_text(self.left)}"


class _Speed:
    """Samples or tokens per second between two reports, without the time of evaluations.

    Attributes:
        text: for example `18.4k tokens/s`; empty before it is known.
    """

    def __init__(self, clock: Clock) -> None:
        self.text = ""
        self._clock = clock
        self._evaluated = 0.0
        self._last: dict[str, tuple[float, float]] = {}

    def leave_out(self, seconds: float) -> None:
        self._evaluated += seconds

    def count(self, unit: str, number: float) -> None:
        """Take the number of samples or tokens since the run began, at this moment."""
        now = self._clock() - self._evaluated
        before, then = self._last.get(unit, (number, now))
        if number > before and now > then:
            self.text = f"{short_number((number - before) / (now - then))} {unit}/s"
        self._last[unit] = (number, now)


class Display:
    """The progress of a run of steps, and of an evaluation within it, which is counted separately. This one shows
    nothing of it.
    """

    # A terminal is redrawn at most this often: drawing takes about a millisecond, a step may take less.
    seconds = 0.2

    def __init__(self, total: int, label: str, *, start: int = 0, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace(total, label, start, clock)
        self._inner: Pace | None = None
        self._last = clock()
        self._speed = _Speed(clock)

    def advance(self, step: int) -> None:
        self._pace.step = step
        self._moved(self._pace)

    def begin_inner(self, label: str, total: int) -> None:
        self._inner = Pace(total, label, 0, self._clock)

    def advance_inner(self, done: int) -> None:
        if self._inner is not None:
            self._inner.step = done
            self._moved(self._inner)

    def end_inner(self) -> None:
        if self._inner is not None:
            self._speed.leave_out(self._inner.elapsed)
        self._inner = None

    def count(self, unit: str, number: float) -> None:
        """Take how many samples or tokens (`unit`) were trained on since the run began."""
        self._speed.count(unit, number)

    def report(self, logs: Metrics, max_str_len: int) -> None:
        """Show logged values as one line."""

    def write(self, text: str) -> None:
        """Show what happened as one line."""

    def close(self) -> None:
        self._inner = None

    def _moved(self, pace: Pace) -> None:
        if self._clock() - self._last >= self.seconds:
            self._show(pace)

    def _show(self, pace: Pace) -> None:
        """Display the progress of `pace`, and note the time."""
        self._last = self._clock()


class LineDisplay(Display):
    """Plain lines for files and pipes: one for each message, and one each minute without a message."""

    seconds = 60.0

    def __init__(self, *args: Any, file: TolerantStream, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file = file

    def report(self, logs: Metrics, max_str_len: int) -> None:
        speed = [self._speed.text] if "loss" in logs and self._speed.text else []
        self.write("  ".join([*words_of(logs, max_str_len), *speed]))

    def write(self, text: str) -> None:
        self._show(self._pace, f" {shown(text)}")

    def _show(self, pace: Pace, message: str = "") -> None:
        super()._show(pace)
        self._file.write(f"[{pace.text()}]{message}\n")
        self._file.flush()


class QuietDisplay(Display):
    """Shows nothing. On a terminal, what this process writes from now on stays apart from the bar that another process
    may draw there: until its end, because the other one may draw for longer.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(0, "")
        if can_redraw(file):
            foot_of(file).draw(QuietDisplay, ())


class BarDisplay(Display):
    """A row for the run, and one for the evaluation within it, at the foot of a terminal; reports above them, in
    columns.
    """

    def __init__(self, *args: Any, file: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._foot, self._owner = foot_of(file), object()
        self._table = LogTable(self._pace.total)
        self._loss = ""
        self._ended = False
        self._style = _style_of(self._foot.stream)
        self._show(self._pace)
        # The first step may take long: imports, memory, compilation.
        self._ticking = Ticking(functools.partial(_tick, weakref.ref(self)))
        # A run that ends in an exception may not call `close`, and what is printed next must not meet the bar.
        self._rescue = weakref.finalize(self, _put_away, self._ticking, self._foot, self._owner)

    def advance(self, step: int) -> None:
        # From now on each step redraws the bar, and a thread that draws too would only take its time.
        if not self._pace.has_moved:
            self._ticking.stop()
        super().advance(step)

    def begin_inner(self, label: str, total: int) -> None:
        super().begin_inner(label, total)
        self._show(self._pace)

    def end_inner(self) -> None:
        if self._inner is not None:
            super().end_inner()
            self._show(self._pace)

    def report(self, logs: Metrics, max_str_len: int) -> None:
        if "loss" not in logs:
            self._say(self._pace.step, words_of(logs, max_str_len, brief=True))
            return
        self._loss = words_of({"loss": logs["loss"]}, max_str_len)[0]
        self._foot.say(shown("\n".join(self._table.lines(self._pace.step, logs, row_width()))))
        rest = {name: value for name, value in logs.items() if not is_number(value)}
        if rest:
            self._say(None, words_of(rest, max_str_len))

    def write(self, text: str) -> None:
        self._say(None, [text])

    def close(self) -> None:
        super().close()
        self._ticking.stop()
        self._ended = True
        self._show(self._pace)
        self._rescue()

    def _say(self, step: int | None, words: list[str]) -> None:
        self._foot.say(self._table.event(step, map(shown, words), row_width()))

    def tick(self) -> None:
        """Draw the time that passes before the first step."""
        self._show(self._pace)

    def _show(self, pace: Pace) -> None:
        super()._show(pace)
        speed = "" if self._ended else self._speed.text  # the last one is not that of the whole run
        rows = [self._row(self._pace, [self._time(), self._loss, speed])]
        if self._inner:
            rows.append(self._row(self._inner, [f"{clock_text(self._inner.left)} left"]))
        self._foot.draw(self._owner, rows)

    def _time(self) -> str:
        if self._ended:
            return f"took {clock_text(self._pace.elapsed)}"
        if self._pace.has_moved:
            return f"{clock_text(self._pace.left)} left"
        return f"first step: {clock_text(self._pace.elapsed)}"

    def _row(self, pace: Pace, facts: list[str]) -> str:
        """The position, a bar, and those of `facts`, most important first, for which there is room; the first of them
        is at the right, below that of the other row.
        """
        columns, position = row_width(), shown(pace.position())
        facts = [fact for fact in facts if fact]
        while facts and columns - len(position) - sum(2 + len(fact) for fact in facts) < _LEAST_BAR + 1:
            facts.pop()
        text = "".join(f"  {fact}" for fact in [*facts[1:], *facts[:1]])
        room = columns - len(position) - len(text) - 1
        bar = f" {self._style(room, pace.step / pace.total)}" if pace.total > 0 and room >= _LEAST_BAR else ""
        return f"{position[:columns]}{bar}{text}"


def _tick(display: weakref.ref[BarDisplay]) -> bool:
    found = display()
    if found is not None:
        found.tick()
    return found is not None


def _put_away(ticking: Ticking, foot: Foot, owner: object) -> None:
    ticking.stop()
    foot.close(owner)


def _style_of(stream: TolerantStream) -> Callable[[int, float], str]:
    """Return what draws a bar of so many columns, of which a share is done, as this stream can show it."""
    full, rest = ("━", "━") if stream.encoding.lower().startswith("utf") else ("#", ".")
    coloured = not os.environ.get("NO_COLOR")

    def bar(room: int, share: float) -> str:
        done = int(room * min(share, 1.0))
        if coloured:
            return f"\x1b[36m{full * done}\x1b[90m{rest * (room - done)}\x1b[0m"
        return full * done + (" " if rest == full else rest) * (room - done)

    return bar
