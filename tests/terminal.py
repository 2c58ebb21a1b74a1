"""Runs commands and scripts on a terminal of their own, and shows what a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyte
from tests.dist.launch import ROOT, end_of_ranks, started_by, started_on


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of a screen, and the name of its colour."""

    text: str
    colour: str


CTRL_C, ENTER, DOWN = "\x03", "\r", "\x1b[B"


class Terminal:
    """A terminal, and what runs on it; what is still running at the end of the `with` block is killed.

    Attributes:
        raw: everything that was written to it.

    Args:
        columns, rows: its size in characters.
        timeout: seconds after which what runs is killed.
    """

    def __init__(self, *, columns: int = 80, rows: int = 24, timeout: float = 90.0) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self._parser = pyte.ByteStream(self._screen)
        self._own, self._slave = pty.openpty()
        self._name, self._timeout = os.ttyname(self._slave), timeout
        self._set_size(columns, rows)
        self.raw = b""
        self._pids: list[int] = []
        self._wait: Callable[[], int] | None = None
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        with contextlib.suppress(AssertionError):
            self.end()
        os.close(self._own)

    def start(self, *command: object, cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> Terminal:
        """Start a command as a shell would."""
        job = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=cwd,
            env={**_environment(), **(environ or {})},
        )
        self._pids, self._wait = [job.pid], job.wait
        return self

    def run(
        self,
        script: Path | str,
        *arguments: object,
        cwd: Path = ROOT,
        environ: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Start a script, or a module given by its name, in a fork of a process that has imported everything."""
        pid, self._wait = started_on(
            self._name, script, *arguments, cwd=cwd, environ={**_environment(), **(environ or {})}
        )
        self._pids = [pid]
        return self

    def run_ranks(self, world: int, script: Path, *arguments: object, cwd: Path = ROOT) -> Terminal:
        """The same on several ranks, which share the terminal as those of a launcher do."""
        self._wait = lambda: end_of_ranks(
            world, self._name, script, *arguments, cwd=cwd, environ=_environment(), timeout=self._timeout
        )
        return self

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._said:
            self._set_size(columns, rows)
            self._screen.resize(rows, columns)

    def send_signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def until(self, text: str) -> None:
        """Wait until `text` is on the screen, or was."""
        with self._said:
            self._said.wait_for(lambda: text in self._text() or not self._reader.is_alive(), self._timeout)
            assert text in self._text(), f"no {text!r} on the screen:\n{self._text()}"

    def end(self) -> int:
        """Wait for the end of what runs; return its exit code, negative for a signal."""
        if self._wait is not None:
            killer = threading.Timer(self._timeout, self._kill)
            killer.start()
            wait, self._wait = self._wait, None
            self._code = wait()
            killer.cancel()
            self._pids = []
            with self._said:
                self._release()
            self._reader.join(10.0)
        return self._code

    @property
    def lines(self) -> list[str]:
        """What a person sees who scrolls up to the beginning, without spaces and empty lines at the end."""
        with self._said:
            return self._text().split("\n")

    @property
    def cells(self) -> list[list[Cell]]:
        """The screen as it is now, row by row."""
        with self._said:
            columns = range(self._screen.columns)
            rows = [self._screen.buffer[row] for row in range(self._screen.lines)]
            return [[Cell(row[column].data, row[column].fg) for column in columns] for row in rows]

    def _text(self) -> str:
        rows = [*self._screen.history.top, *(self._screen.buffer[row] for row in range(self._screen.lines))]
        lines = ("".join(row[column].data for column in range(max(row, default=-1) + 1)) for row in rows)
        return "\n".join(line.rstrip() for line in lines).rstrip("\n")

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._own, 65536)
            except OSError:  # no process has the terminal open any more
                piece = b""
            with self._said:
                self._release()  # they have opened it: from now on its end is theirs
                self.raw += piece
                self._parser.feed(piece)
                self._said.notify_all()
            if not piece:
                return

    def _release(self) -> None:
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _kill(self) -> None:
        for pid in [pid for one in self._pids for pid in (*started_by(one), one)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Of a shell on this terminal: nothing of the one on which the tests were started."""
    own = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
