"""Where each process of a job is: its step and the call it is in, written where the launcher can read them.

Each rank owns one small file, mapped into memory. A mark is a write into that memory: no system call, no lock, well
under a microsecond. The launcher reads the files when a job fails, and watches them to notice one without progress. It
makes them and holds them open, so that they can be read when their folder has been removed. Without a launcher that
asks for them there is no file, and the marks are for this process alone, whose watchdog looks at them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import mmap
import os
import signal
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
# The folder of the marks. The launcher creates a new one for each attempt and names it to its processes.
FOLDER_VARIABLE = "WINDLASS_BEACON"
# A process that receives this writes the stacks of all its threads. Real-time signals have no other users: schedulers
# send SIGUSR1 and SIGUSR2 to announce that a job ends.
STACKS_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR1)

# How the mark begins of a process that came out of an exchange and is in code of its own.
AFTER = "after "
# The call of a process whose script has left no marks yet.
START = "start"
# The call of a process that saved and left because it was asked to, of one whose script ended well, and of one whose
# script ended well in a process that joined no process group.
LEFT = "left"
END = "end"
END_ALONE = "end, without having joined a process group"
# The call of a process that waits for all ranks of the job to join the process group.
MEETING = "join the process group"
# How the mark begins of calls of a tracker of experiments.
REPORT = "report to "
# How the mark begins while a script's own callback answers an event of an update.
CALLBACK = "callback "
# How the marks begin of calls in which a process waits for other ranks, and of all calls whose length is reported;
# limited waits are reported too.
EXCHANGES = ("gather", "sum", "vote", "barrier", "broadcast", "reduce", "exchange", "join")
WAITS = (
    *EXCHANGES,
    "forward and backward",
    "backward",
    "norm and update",
    "update",
    "save",
    REPORT,
    CALLBACK,
)
# A mark: how many marks were written, the updates done (-1: unknown), and the name of the call, padded with zeros.
_MARK = struct.Struct("<qq64s")
_NO_STEP = -1
# Behind it, written by the watchdog: how often it has looked, and the collectives that were issued (-1: not known).
_LIFE = struct.Struct("<qq")
_SIZE = _MARK.size + _LIFE.size
# Marks up to here come from the start of the process, before the script reports anything.
_OPENING_MARKS = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """The last sign of a process."""

    count: int  # marks written so far; unchanged while the process makes no progress
    step: int | None  # updates that were done; None before the script reported a step
    call: str  # what it was about to do: "backward", "save", "gather objects", ..
    # How often the watchdog of the process has looked; unchanged while the process is stopped, or while native code
    # keeps all others of its threads from running
    looks: int = 0
    collectives: int = -1  # issued on the process group of all ranks; -1 where not known

    @property
    def place(self) -> str:
        """The step and the call, for messages."""
        within = not self.call.startswith(AFTER)
        where = f"in '{self.call}'" if within else f"in its own code, after '{self.call.removeprefix(AFTER)}'"
        return f"[before the first step, {where}]" if self.step is None else f"[step {self.step}, {where}]"

    @property
    def waits(self) -> bool:
        """Whether it was in an exchange, where a rank makes no progress because another one does not come."""
        return self.call.startswith(EXCHANGES)

    @property
    def lag(self) -> tuple[int, bool, int]:
        """Smaller for a rank that others wait for than for those that wait."""
        return (-1 if self.step is None else self.step, self.waits, self.collectives)

    @property
    def is_opening(self) -> bool:
        """True if the process has started and reported nothing since: it may be a script that writes no marks."""
        return self.count <= _OPENING_MARKS

    @property
    def never_joined(self) -> bool:
        """Whether the process ended well without having joined a process group."""
        return self.call == END_ALONE


class Beacon:
    """Takes marks. This one keeps them for this process: the normal case, without a launcher that looks at them.

    Attributes:
        limited: names of the waits under way that the watchdog limits. The last mark does not tell: it stays after an
            error, which a script may catch before it goes on with its own work.
    """

    def __init__(self) -> None:
        self.limited: list[str] = []
        self._count, self._step, self._call = 1, _NO_STEP, START
        self._looks, self._collectives = 0, -1

    def call(self, name: str, step: int | None = None) -> None:
        """Record the next operation, and that `step` updates are done, if it is given. The launcher reads the first 64
        bytes of the name in UTF-8.
        """
        self._call = name
        self._step = self._step if step is None else step
        self._count += 1

    def note(self, name: str) -> None:
        """Record the current activity without counting it as progress."""
        self._call = name

    def sign(self, collectives: int) -> None:
        """Record that the process is alive, and how many collectives it has issued, without counting it as progress."""
        self._looks += 1
        self._collectives = collectives

    def place(self, text: str) -> None:
        """Record the position of this process along the axes of its job."""

    def mark(self) -> Mark:
        """The last mark of this process."""
        step = None if self._step == _NO_STEP else self._step
        return Mark(self._count, step, self._call, self._looks, self._collectives)


class LitBeacon(Beacon):
    """Leaves marks in the file of its rank, too."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._write_life()
        self._write_mark()

    def call(self, name: str, step: int | None = None) -> None:
        super().call(name, step)
        self._write_mark()

    def note(self, name: str) -> None:
        super().note(name)
        self._write_mark()

    def sign(self, collectives: int) -> None:
        super().sign(collectives)
        self._write_life()

    def place(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is full
            self._path.with_suffix(".place").write_text(text)

    def _write_mark(self) -> None:
        _MARK.pack_into(self._map, 0, self._count, self._step, self._call.encode())

    def _write_life(self) -> None:
        _LIFE.pack_into(self._map, _MARK.size, self._looks, self._collectives)


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """Mark that this process is in the call `name`, and that it returned.

    After an error the first mark remains: reports name the call that failed, and of ranks that lost their peers those
    that waited in an exchange are not to blame.
    """
    beacon().call(name)
    yield
    beacon().call(f"{AFTER}{name}")


@contextlib.contextmanager
def noted(name: str) -> Iterator[None]:
    """Within the body the mark has this name, which does not count as progress; an error leaves it, as in `waiting`."""
    marks = beacon()
    before = marks.mark().call
    marks.note(name)
    yield
    if marks.mark().call == name:  # else it has made calls of its own
        marks.note(before)


@contextlib.contextmanager
def limited_wait(name: str) -> Iterator[None]:
    """`waiting`, where nothing else limits the wait: the watchdog ends a process that waits longer than it may."""
    under_way = beacon().limited
    under_way.append(name)
    try:
        with waiting(name):
            yield
    finally:
        under_way.remove(name)


def marked_reads(batches: Iterator[_T]) -> Iterator[_T]:
    """The same batches, with the wait for each of them as a `limited_wait`. What is done with a batch is not a wait."""
    while True:
        with limited_wait("read data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def light(environ: Mapping[str, str]) -> Beacon:
    """The beacon that the launcher asked for in `environ`; without one, marks stay within this process.

    Also prepares this process to write the stacks of its threads when the launcher asks for them.
    """
    folder, rank = environ.get(FOLDER_VARIABLE), environ.get("RANK")
    if not folder or rank is None:
        return Beacon()
    try:
        # The file stays open for as long as the process lives: the signal may come at any time.
        stacks = stacks_path(Path(folder), int(rank)).open("w")
        lit = LitBeacon(mark_path(Path(folder), int(rank)))
    except OSError:  # the folder was removed, or its disk is full: the run does not need it
        return Beacon()
    if threading.current_thread() is threading.main_thread():
        # What is put back when the interpreter comes down: a question asked then must not kill a process that ends.
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return lit


@cache
def beacon() -> Beacon:
    """The beacon of this process."""
    return light(os.environ)


def mark_path(folder: Path, rank: int) -> Path:
    """The file with the marks of global rank `rank`."""
    return folder / f"rank-{rank:05d}.mark"


def stacks_path(folder: Path, rank: int) -> Path:
    """The file into which global rank `rank` writes its stacks."""
    return folder / f"rank-{rank:05d}.stacks"


class Lookout:
    """What one rank leaves in the folder, for its launcher. It is read as it was left after the folder was removed.

    Args:
        make: make the files, before the process starts; else they are opened once the process has made them.
    """

    def __init__(self, folder: Path, rank: int, *, make: bool = False) -> None:
        self._paths = {"mark": mark_path(folder, rank), "stacks": stacks_path(folder, rank)}
        self._paths["place"] = self._paths["mark"].with_suffix(".place")
        self._files: dict[str, io.FileIO] = {}
        if make:
            for path in self._paths.values():
                path.touch()
            self.mark()
            self.stacks()
            self.place()

    def mark(self) -> Mark | None:
        """The last mark; None if there is none, as of a program that is not Python."""
        return _as_mark(self._content("mark"))

    def stacks(self) -> str:
        """The stacks that it wrote when it was asked for them last, empty if it did not answer."""
        return self._content("stacks").decode("utf-8", "replace")

    def place(self) -> str:
        """Its position along the axes of the job; empty if ranks only have different samples."""
        return self._content("place").decode("utf-8", "replace")

    def _content(self, name: str) -> bytes:
        with contextlib.suppress(OSError):
            if name not in self._files:
                self._files[name] = io.FileIO(self._paths[name])
            self._files[name].seek(0)
            return self._files[name].readall()
        return b""


def _as_mark(content: bytes) -> Mark | None:
    if len(content) != _SIZE:
        return None
    count, step, call = _MARK.unpack_from(content)
    if count == 0:
        return None  # the launcher made the file, and the process has not come to its first mark
    text = call.rstrip(b"\0").decode(errors="replace")
    return Mark(count, None if step == _NO_STEP else step, text, *_LIFE.unpack_from(content, _MARK.size))
