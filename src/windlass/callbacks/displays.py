"""Where progress is shown: a rich bar, a plain bar, or lines of text. Each has the same verbs."""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from windlass.core.optional import is_available, require
from windlass.core.output import STDOUT, TolerantStream, shown

# A terminal is redrawn at most this often: drawing costs about a millisecond, a step may cost less.
_REDRAW_SECONDS = 0.2
# A log file hears of progress at least this often, when nothing else is written.
_HEARTBEAT_SECONDS = 60.0
Clock = Callable[[], float]


class Display(Protocol):
    """One run of steps, shown while it goes on. An evaluation inside it is counted on its own."""

    def advance(self, step: int) -> None: ...

    def begin_inner(self, label: str, total: int) -> None: ...

    def advance_inner(self, done: int) -> None: ...

    def end_inner(self) -> None: ...

    def write(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_display(total: int, label: str, *, start: int = 0, file: TextIO | None = None) -> Display:
    """The best display that `file` (default: standard output) can show.

    A terminal gets a bar (rich's where rich is installed); anything else gets whole lines without carriage
    returns.

    Args:
        total: steps of the run.
        start: steps already done, when resumed.
    """
    stream = TolerantStream(file) if file else STDOUT
    if not stream.isatty():
        return LineDisplay(total, label, start=start, file=stream)
    if is_available("rich"):
        return RichDisplay(total, label, start=start, file=stream)
    return BarDisplay(total, label, start=start, file=stream)


def clock_text(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`; a dash pair where the time is not known."""
    if not 0 <= seconds < float("inf"):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Pace:
    """How far a run is, how long it took, and how long it will take."""

    def __init__(self, total: int, label: str, start: int, clock: Clock) -> None:
        self.total = total
        self.label = label
        self.step = self._first = start
        self._clock = clock
        self._began = clock()

    def text(self) -> str:
        """For example `train 40/100 40% 0:12<0:18`: done, share, elapsed, left."""
        elapsed = self._clock() - self._began
        done = self.step - self._first
        left = elapsed / done * (self.total - self.step) if done > 0 else float("inf")
        share = f" {self.step / self.total:.0%}" if self.total > 0 else ""
        return f"{self.label} {self.step}/{self.total}{share} {clock_text(elapsed)}<{clock_text(left)}"


class _PacedDisplay:
    """What lines and bars have in common: the pace of the run, and of an evaluation within it."""

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

    def _moved(self, pace: _Pace) -> None:
        """Show that `pace` went on, where it is time to."""
        raise NotImplementedError


class LineDisplay(_PacedDisplay):
    """Plain lines for files and pipes: one for each message, and a sign of life each minute without one."""

    def end_inner(self) -> None:
        self._inner = None

    def write(self, text: str) -> None:
        self._print(f"[{self._pace.text()}] {shown(text)}")

    def close(self) -> None:
        self._inner = None

    def _moved(self, pace: _Pace) -> None:
        if self._clock() - self._last >= _HEARTBEAT_SECONDS:
            self._print(f"[{pace.text()}]")

    def _print(self, line: str) -> None:
        self._last = self._clock()
        self._file.write(f"{line}\n")
        self._file.flush()


class BarDisplay(_PacedDisplay):
    """A one-line bar for terminals, drawn with nothing but a carriage return."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last = float("-inf")
        self._draw()

    def end_inner(self) -> None:
        self._inner = None
        self._draw()

    def write(self, text: str) -> None:
        self._file.write(f"{self._cleared()}{shown(text)}\n")
        self._draw()

    def close(self) -> None:
        self._draw()
        self._file.write("\n")
        self._file.flush()

    def _moved(self, pace: _Pace) -> None:
        if self._clock() - self._last >= _REDRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._last = self._clock()
        pace = self._inner or self._pace
        text = pace.text()
        room = shutil.get_terminal_size().columns - len(text) - 4
        filled = int(room * pace.step / pace.total) if pace.total > 0 and room > 0 else 0
        bar = f" |{'#' * filled}{'.' * (room - filled)}|" if room > 0 else ""
        self._file.write(f"{self._cleared()}{text}{bar}")
        self._file.flush()

    def _cleared(self) -> str:
        return "\r\x1b[2K"


class RichDisplay:
    """rich's bar. Redrawn from the training thread, not from a thread of its own: fewer surprises when
    processes fork.
    """

    def __init__(self, total: int, label: str, *, start: int = 0, file: TolerantStream | None = None) -> None:
        progress, console = require("rich.progress", "draw a bar"), require("rich.console", "draw a bar")
        self._console: Any = console.Console(file=file or STDOUT)
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
        self._main = self._bar.add_task(label, total=total or None, completed=start)
        self._inner: Any = None
        self._pending: tuple[Any, int] | None = None  # counted, and not drawn yet
        # A run that ends in an exception closes nothing: the terminal must get its cursor back all the same.
        self._rescue = weakref.finalize(self, self._bar.stop)
        self._last = time.monotonic()
        self._bar.start()
        self._bar.refresh()

    def advance(self, step: int) -> None:
        self._show(self._main, step)

    def begin_inner(self, label: str, total: int) -> None:
        self._redraw()
        self._inner = self._bar.add_task(label, total=total)

    def advance_inner(self, done: int) -> None:
        if self._inner is not None:
            self._show(self._inner, done)

    def end_inner(self) -> None:
        if self._inner is not None:
            self._pending = None
            self._bar.remove_task(self._inner)
            self._inner = None
            self._redraw()

    def write(self, text: str) -> None:
        self._console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._redraw()
        self._rescue()

    def _show(self, task: Any, completed: int) -> None:
        self._pending = (task, completed)
        if time.monotonic() - self._last >= _REDRAW_SECONDS:
            self._redraw()

    def _redraw(self) -> None:
        self._last = time.monotonic()
        if self._pending is not None:
            task, completed = self._pending
            self._bar.update(task, completed=completed)
            self._pending = None
        self._bar.refresh()
