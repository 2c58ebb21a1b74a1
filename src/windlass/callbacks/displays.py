"""Displays of progress: a rich bar, a plain bar, lines of text, or nothing, all with the same methods."""

from __future__ import annotations

import shutil
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from windlass.core.optional import is_available, require
from windlass.core.output import STDOUT, TolerantStream, shown
from windlass.core.terminal import can_redraw, foot_of

Clock = Callable[[], float]


def open_display(
    total: int, label: str, *, start: int = 0, file: TextIO | None = None, drawn: bool = True
) -> Display:
    """Return the best display for `file` (default: standard output).

    A terminal gets a bar, rich's if rich is installed; anything else gets whole lines without carriage returns.

    Args:
        total: steps of the run.
        start: steps already done, when resumed.
        drawn: False in a process that leaves the display to another one.
    """
    stream = file or sys.stdout
    if not drawn:
        return QuietDisplay(stream)
    if can_redraw(stream):
        kind = RichDisplay if is_available("rich") else BarDisplay
        return kind(total, label, start=start, file=stream)
    return LineDisplay(total, label, start=start, file=TolerantStream(file) if file else STDOUT)


def clock_text(seconds: float) -> str:
    """Return seconds as `m:ss` or `h:mm:ss`; dashes if the time is not known."""
    if not 0 <= seconds < float("inf"):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Pace:
    """The progress of a run, its duration, and an estimate of the time left."""

    def __init__(self, total: int, label: str, start: int, clock: Clock) -> None:
        self.total = total
        self.label = label
        self.step = self._first = start
        self._clock = clock
        self._began = clock()

    def text(self) -> str:
        """Return for example `train 40/100 40% 0:12<0:18`: done, share, elapsed, left."""
        elapsed = self._clock() - self._began
        done = self.step - self._first
        left = elapsed / done * (self.total - self.step) if done > 0 else float("inf")
        share = f" {self.step / self.total:.0%}" if self.total > 0 else ""
        return f"{self.label} {self.step}/{self.total}{share} {clock_text(elapsed)}<{clock_text(left)}"


class Display:
    """The progress of a run of steps, and of an evaluation within it, which has a count of its own."""

    # A terminal is redrawn at most this often: drawing takes about a millisecond, a step may take less.
    seconds = 0.2

    def __init__(
        self,
        total: int,
        label: str,
        *,
        start: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._pace = _Pace(total, label, start, clock)
        self._inner: _Pace | None = None
        self._last = clock()

    def advance(self, step: int) -> None:
        self._pace.step = step
        self._moved(self._pace)

    def begin_inner(self, label: str, total: int) -> None:
        self._inner = _Pace(total, label, 0, self._clock)

    def advance_inner(self, done: int) -> None:
        if self._inner is not None:
            self._inner.step = done
            self._moved(self._inner)

    def end_inner(self) -> None:
        self._inner = None

    def write(self, *words: str) -> None:
        """Print a line of words, which may hold spaces."""
        raise NotImplementedError

    def close(self) -> None:
        self._inner = None

    def _moved(self, pace: _Pace) -> None:
        if self._clock() - self._last >= self.seconds:
            self._show(pace)

    def _show(self, pace: _Pace) -> None:
        """Display the progress of `pace`, and note the time."""
        raise NotImplementedError


class LineDisplay(Display):
    """Plain lines for files and pipes: one for each message, and one each minute without a message."""

    seconds = 60.0

    def __init__(self, *args: Any, file: TolerantStream, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file = file

    def write(self, *words: str) -> None:
        self._show(self._pace, f" {shown('  '.join(words))}")

    def _show(self, pace: _Pace, message: str = "") -> None:
        self._last = self._clock()
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

    def write(self, *words: str) -> None:
        pass

    def _show(self, pace: _Pace) -> None:
        self._last = self._clock()


class BarDisplay(Display):
    """A row for the run, and one for the evaluation within it, at the foot of a terminal."""

    def __init__(self, *args: Any, file: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._foot, self._owner = foot_of(file), object()
        # A run that ends in an exception may not call `close`, and what is printed next must not meet the bar.
        self._rescue = weakref.finalize(self, self._foot.close, self._owner)
        self._show(self._pace)

    def begin_inner(self, label: str, total: int) -> None:
        super().begin_inner(label, total)
        self._show(self._pace)

    def end_inner(self) -> None:
        if self._inner is not None:
            super().end_inner()
            self._show(self._pace)

    def write(self, *words: str) -> None:
        self._foot.say(_folded([f"step {self._pace.step}", *map(shown, words)], _columns()))

    def close(self) -> None:
        super().close()
        self._show(self._pace)
        self._rescue()

    def _show(self, pace: _Pace) -> None:
        self._last = self._clock()
        shown_now = [self._pace, self._inner] if self._inner else [self._pace]
        self._foot.draw(self._owner, [self._row(pace) for pace in shown_now])

    def _row(self, pace: _Pace) -> str:
        text = shown(pace.text())
        room = _columns() - len(text) - 1
        return f"{text} {self._bar(pace, room)}" if pace.total > 0 and room > 0 else text[: _columns()]

    def _bar(self, pace: _Pace, room: int) -> str:
        """The share of `pace` that is done, `room` columns wide."""
        filled = room * min(pace.step, pace.total) // pace.total
        return "#" * filled + "." * (room - filled)


class RichDisplay(BarDisplay):
    """The same with rich's bar, in colours where the terminal has them."""

    def _bar(self, pace: _Pace, room: int) -> str:
        console = require("rich.console", "draw a bar").Console(file=self._foot.stream, width=room)
        bar = require("rich.progress_bar", "draw a bar").ProgressBar(
            total=pace.total, completed=pace.step, width=room
        )
        with console.capture() as drawn:  # rich's own live display would replace `sys.stdout`
            console.print(bar, end="")
        return str(drawn.get())


def _columns() -> int:
    """How long a row may be: a full one would begin another in some terminals."""
    return max(shutil.get_terminal_size().columns - 1, 1)


def _folded(words: Sequence[str], columns: int) -> str:
    """Lines of whole words, two spaces between them and at the beginning of every further line."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 2 + len(word) > columns:
            lines.append(f"  {word}")
        else:
            lines[-1] += f"  {word}"
    return "\n".join(lines)
