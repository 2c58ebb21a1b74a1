"""`.windlass-uploads.jsonl`: the uploads of a run that ended, one JSON object a line, for readers of its folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from windlass.core.run_clock import LATEST
from windlass.core.whole_file import BINARY, NO_FOLLOW, newest_lines

UPLOADS = ".windlass-uploads.jsonl"
_MOST_BYTES = 1 << 20


def note_upload(folder: Path, what: str, step: int | None, problem: str = "") -> None:
    """Note that an upload ended. What cannot be written is left out: the upload itself matters.

    Args:
        step: of the checkpoint; None: it is of the run's end.
        problem: why it failed; empty if it arrived.
    """
    row = {"what": what, "step": step, "time": time.time(), "problem": problem}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW | BINARY
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / UPLOADS, flags, 0o666)
        try:
            # A whole line in one write to its end (O_APPEND): those of two processes do not mix.
            os.write(descriptor, json.dumps(row).encode() + b"\n")
        finally:
            os.close(descriptor)


def read_uploads(folder: Path) -> list[dict[str, Any]]:
    """Return the newest uploads that were noted; damaged lines are left out."""
    return [row for row in newest_lines(folder / UPLOADS, _MOST_BYTES) if _is_upload(row)]


def _is_upload(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("what", "problem")):
        return False
    step, moment = row.get("step", -1), row.get("time")
    if not isinstance(moment, int | float) or not 0 <= moment <= LATEST:  # false for NaN
        return False
    return step is None or (type(step) is int and 0 <= step <= LATEST)
