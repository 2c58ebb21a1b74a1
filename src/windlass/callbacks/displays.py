"""Displays of progress: a rich bar, a plain bar, or lines of text, all with the same methods."""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from windlass.core.optional import is_available, require
from windlass.core.output import STDOUT, TolerantStream, shown

_CLEAR_LINE = "\r\x1b[2K"
Clock = Callable[[], float]


def open_display(total: int, label: str, *, start: int = 0, file: TextIO | None = None) -> Display:
    """Return the best display for `file` (default: standard output).

    A terminal gets a bar, rich's if rich is installed; anything else gets whole lines without carriage returns.

    Args:
        total: steps of the run.
        start: steps already done, when resumed.
    """
    stream = TolerantStream(file) if file else STDOUT
    kind: type[Display] = LineDisplay
    if stream.isatty():
        kind = RichDisplay if is_available("rich") else BarDisplay
    return kind(total, label, start=start, file=stream)


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
        file: TolerantStream | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._file = file or STDOUT
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

    def write(self, text: str) -> None:
        """Print a line."""
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

    def write(self, text: str) -> None:
        self._show(self._pace, f" {shown(text)}")

    def _show(self, pace: _Pace, message: str = "") -> None:
        self._last = self._clock()
        self._file.write(f"[{pace.text()}]{message}\n")
        self._file.flush()


class BarDisplay(Display):
    """A one-line bar for terminals, drawn with carriage returns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last = float("-inf")
        self._show(self._pace)

    def end_inner(self) -> None:
        super().end_inner()
        self._show(self._pace)

    def write(self, text: str) -> None:
        self._file.write(f"{_CLEAR_LINE}{shown(text)}\n")
        self._show(self._pace)

    def close(self) -> None:
        self._show(self._pace)
        self._file.write("\n")
        self._file.flush()

    def _show(self, pace: _Pace) -> None:
        self._last = self._clock()
        pace = self._inner or pace
        text = pace.text()
        room = shutil.get_terminal_size().columns - len(text) - 4
        filled = int(room * pace.step / pace.total) if pace.total > 0 and room > 0 else 0
        bar = f" |{'#' * filled}{'.' * (room - filled)}|" if room > 0 else ""
        self._file.write(f"{_CLEAR_LINE}{text}{bar}")
        self._file.flush()


class RichDisplay(Display):
    """rich's bar, redrawn from the training thread: a thread of its own would not survive a fork."""

    def __init__(self, total: int, label: str, *, start: int = 0, file: TolerantStream | None = None) -> None:
        super().__init__(total, label, start=start, file=file)
        progress, console = require("rich.progress", "draw a bar"), require("rich.console", "draw a bar")
        self._console: Any = console.Console(file=self._file)
        self._bar: Any = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task(label, total=total or None, completed=start)
        self._inner_task: Any = None
        # A run that ends in an exception does not call `close`, and the terminal must get its cursor back.
        self._rescue = weakref.finalize(self, self._bar.stop)
        self._bar.start()
        self._bar.refresh()

    def begin_inner(self, label: str, total: int) -> None:
        self._show(self._pace)
        super().begin_inner(label, total)
        self._inner_task = self._bar.add_task(label, total=total)

    def end_inner(self) -> None:
        if self._inner is not None:
            super().end_inner()
            self._bar.remove_task(self._inner_task)
            self._show(self._pace)

    def write(self, text: str) -> None:
        self._console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._show(self._pace)
        self._rescue()

    def _show(self, pace: _Pace) -> None:
        self._last = self._clock()
        self._bar.update(self._task, completed=self._pace.step)
        if self._inner is not None:
            self._bar.update(self._inner_task, completed=self._inner.step)
        self._bar.refresh()
