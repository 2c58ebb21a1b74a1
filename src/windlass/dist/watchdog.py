"""A thread of each process that reports what the process waits for when it makes no progress for a minute.

It wakes every few seconds and compares the beacon's marks: a step costs nothing more. The report names the call, the
stacks of this process, and the ranks that the others wait for, as far as their marks can be read: in the folder of the
launcher, or in the store of the process group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from windlass.core.logs import get_logger
from windlass.dist.beacon import AFTER, MEETING, START, WAITS, Beacon, Mark, beacon
from windlass.dist.other_ranks import OtherRanks

logger = get_logger(__name__)

# Seconds without a mark after which a wait is reported.
REPORT_VARIABLE = "WINDLASS_REPORT_WAITS_AFTER"
_REPORT_SECONDS = 60.0
# The exit code of a process that waited longer than it may.
EXIT_STALLED = 124
_LOOK_SECONDS = 2.0
# How long a process that ends waits for the last look, which may wait for a store that is gone.
_LAST_LOOK_SECONDS = 5.0
# Waits that nothing else limits; collectives have the timeout of their process group.
_LIMITED = ("read data", "wait for")


class Watchdog:
    """Looks at the marks of this process.

    Args:
        report_after: seconds without a mark after which a wait is reported, once.
        limit: seconds that the process may wait for data or for a background save; then it ends with 124.
    """

    def __init__(self, marks: Beacon, others: OtherRanks, report_after: float, limit: float) -> None:
        self.limit = limit
        self._beacon, self._others, self._report_after = marks, others, report_after
        self._count, self._idle, self._reported = -1, 0.0, False
        self._marked_meeting = False
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until `end` is called."""
        interval, before = min(_LOOK_SECONDS, self._report_after / 4), time.monotonic()
        while not self._ended.wait(interval):
            now = time.monotonic()
            # A process that was stopped and goes on was not waiting in between.
            self.look(min(now - before, 2 * interval))
            before = now

    def end(self, thread: threading.Thread) -> None:
        """Called when the interpreter shuts down: wait for the thread that looks, then for those that it started.

        It may be in a call of the store, which returns into an interpreter that is gone: that aborts the process.
        """
        self._ended.set()
        thread.join(_LAST_LOOK_SECONDS)
        self._others.end()

    def look(self, elapsed: float) -> None:
        """Compare the marks with those of `elapsed` seconds ago."""
        self._mark_meeting()
        self._beacon.sign(collectives_issued())
        mark = self._beacon.mark()
        self._others.publish(mark)
        if mark.count != self._count:
            self._count, self._idle, self._reported = mark.count, 0.0, False
            return
        self._idle += elapsed
        if not mark.call.startswith(WAITS):
            return
        if self._idle >= self._report_after / 2:
            self._others.look(elapsed)
        if self._idle >= self._report_after and not self._reported:
            self._reported = True
            logger.warning("%s", self.report(mark))
        if self._idle >= self.limit and mark.call.startswith(_LIMITED):
            self._end(mark)

    def report(self, mark: Mark) -> str:
        """What this process waits for."""
        text = f"{self._others.own_name} has made no progress for {self._idle:.0f} s {mark.place}"
        missing = self._others.missing(mark)
        if missing:
            text += f"; it waits for {missing}"
        return f"{text}\n{stacks()}"

    def _end(self, mark: Mark) -> None:
        logger.error(
            "%s\nthe process ends with exit code %d: it has waited longer than ddp_timeout=%g s allows",
            self.report(mark),
            EXIT_STALLED,
            self.limit,
        )
        sys.stderr.flush()
        if not hasattr(sys, "ps1") and "ipykernel" not in sys.modules:  # a notebook keeps its other work
            os._exit(EXIT_STALLED)

    def _mark_meeting(self) -> None:
        """Mark the wait of a script that opens the process group itself and leaves no marks."""
        call = self._beacon.mark().call
        if call == START and in_main_thread("init_process_group", "distributed_c10d.py"):
            self._marked_meeting, self._idle = True, 0.0
            self._beacon.note(MEETING)
        elif (
            call == MEETING
            and self._marked_meeting
            and not in_main_thread("init_process_group", "distributed_c10d.py")
        ):
            self._marked_meeting = False
            self._beacon.note(f"{AFTER}{MEETING}")


_watched: tuple[int, Watchdog] | None = None


def watch(environ: Mapping[str, str], limit: float | None = None) -> None:
    """Watch this process from now on, and set the limit of its waits to `limit` seconds."""
    global _watched
    if _watched is None or _watched[0] != os.getpid():  # threads are not inherited by a fork
        after = float(environ.get(REPORT_VARIABLE, _REPORT_SECONDS))
        dog = Watchdog(beacon(), OtherRanks(environ, after), after, limit or float("inf"))
        _watched = (os.getpid(), dog)
        thread = threading.Thread(target=dog.run, name="windlass-watchdog", daemon=True)
        thread.start()
        atexit.register(dog.end, thread)
    elif limit is not None:
        _watched[1].limit = limit


def collectives_issued() -> int:
    """How many collectives this process has issued on the process group of all ranks; -1 if there is none.

    Of ranks that all wait in a collective, the one that has issued fewer is the one that the others wait for.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return int(c10d.group.WORLD._get_sequence_number_for_group()) if c10d.is_initialized() else -1
    except (AttributeError, RuntimeError):  # no torch, or a backend that does not count
        return -1


def in_main_thread(function: str, file: str) -> bool:
    """Whether the main thread is in a call of `function` of a file whose path ends with `file`."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def stacks() -> str:
    """The stacks of all threads of this process but the watching one, the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [main, *(t for t in threading.enumerate() if t not in (main, threading.current_thread()))]
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and not thread.name.startswith("windlass-watch"):
            parts.append(
                f"Thread {thread.name}, innermost call last:\n{''.join(traceback.format_stack(frame))}"
            )
    return "".join(parts).rstrip()
