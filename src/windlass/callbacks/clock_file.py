"""`.windlass-clock.json`: what the clock of a run shows, written once a second while it runs.

A killed session leaves it behind, so that its last seconds and updates are known. One thread writes it, in place and
with one call of the system, so a step waits for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any, TypeGuard

from windlass.core.run_clock import KINDS, LATEST, ClockReading, RunClock
from windlass.core.whole_file import BINARY, NO_FOLLOW, OutputFolder, read_json

CLOCK = ".windlass-clock.json"
_SECONDS = 1.0  # between two writes
_BYTES = 1024  # the file always has this length, so that a shorter content leaves nothing of an earlier one


class ClockFile:
    """Writes the file of one session until `close`. A write that fails is left out: a full disk may have room again."""

    def __init__(self, folder: OutputFolder, clock: RunClock) -> None:
        self._folder, self._clock = folder, clock
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write it now, and once a second."""
        self.write()
        self._thread = threading.Thread(target=self._run, name="windlass-clock", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write what the clock shows now, if it can be written."""
        line = json.dumps(_plain(self._clock.read())).encode("ascii").ljust(_BYTES - 1) + b"\n"
        with contextlib.suppress(OSError):
            self._folder.check()
            flags = os.O_WRONLY | os.O_CREAT | NO_FOLLOW | BINARY
            descriptor = os.open(self._folder.path / CLOCK, flags, 0o666)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Stop writing, and remove the file, whose content is in `run.json` by now."""
        self._over.set()
        if self._thread is not None and self._thread.is_alive():  # Ctrl-C may have come before it started
            self._thread.join(timeout=5.0)  # a file system that hangs must not keep the run
        with contextlib.suppress(OSError):
            (self._folder.path / CLOCK).unlink()

    def _run(self) -> None:
        while not self._over.wait(_SECONDS):
            self.write()


def _plain(reading: ClockReading) -> dict[str, Any]:
    return {
        "began": reading.began,
        "elapsed": round(reading.elapsed, 4),
        "kind": reading.kind,
        "step": reading.step,
        "seconds": rounded(reading.seconds),
    }


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Return seconds with four digits, without those that have none left."""
    return {name: value for name, given in seconds.items() if (value := round(given, 4))}


def read_clock(folder: Path) -> ClockReading | None:
    """Return what the clock of a session showed last; None if the folder has no whole file."""
    found = read_json(folder / CLOCK, _BYTES)
    if not isinstance(found, dict) or not is_seconds(found.get("seconds")):
        return None
    times, step = [found.get(name) for name in ("began", "elapsed")], found.get("step")
    began, elapsed = times
    if (
        not _is_time(began)
        or not _is_time(elapsed)
        or type(step) is not int
        or found.get("kind") not in KINDS
    ):
        return None
    return ClockReading(began, elapsed, found["seconds"], found["kind"], max(step, 0))


def is_seconds(found: Any) -> bool:
    """Return True if these are seconds by kind."""
    return isinstance(found, dict) and all(name in KINDS and _is_time(value) for name, value in found.items())


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -1 <= value <= LATEST  # false for NaN
