"""The files that a killed run leaves, for the reader of its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.callbacks.test_report import log_run

from windlass.callbacks.clock_file import CLOCK, ClockFile
from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_view import read_run
from windlass.cli.run_status import status_of_run
from windlass.core.run_clock import RunClock
from windlass.core.upload_log import UPLOADS, note_upload
from windlass.core.whole_file import OutputFolder

FAILURE = ".windlass-failure-1.json"
LEFT = (CLOCK, FAILURE, UPLOADS)


def killed_run(folder: Path) -> None:
    """Write the files of a run with its clock, its uploads, and what a rank left of its failure."""
    log_run(folder, max_steps=10)
    clock = RunClock()
    clock.begin()
    ClockFile(OutputFolder(folder), clock).write()
    failure = {
        "rank": 1,
        "step": 5,
        "time": time.time(),
        "status": "failed",
        "reason": "x",
        "of_others": False,
    }
    (folder / FAILURE).write_text(json.dumps(failure))
    note_upload(folder, "checkpoint-5", 5)
    note_upload(folder, "the model", None, "no room")


def status_of(folder: Path) -> None:
    """Read a killed run: what is damaged is left out, so any error is one too many."""
    view = read_run(folder)
    json.dumps(status_of_run(view), allow_nan=False)
    render_page([summarised(view)])
