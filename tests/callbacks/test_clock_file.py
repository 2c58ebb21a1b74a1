"""The clock of a run is written while it can be."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.interrupts import InterruptAt

from windlass.callbacks import clock_file
from windlass.callbacks.clock_file import CLOCK, ClockFile, read_clock
from windlass.core.run_clock import RunClock
from windlass.core.whole_file import OutputFolder


def test_the_clock_goes_on_once_the_disk_works_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.callbacks.clock_file._SECONDS", 0.001)
    clock = RunClock()
    clock.begin()
    (tmp_path / CLOCK).symlink_to(tmp_path / "elsewhere")  # a write that fails: links are not followed
    file = ClockFile(OutputFolder(tmp_path), clock)
    file.begin()
    assert read_clock(tmp_path) is None
    (tmp_path / CLOCK).unlink()
    for _ in range(100_000):
        if read_clock(tmp_path) is not None:
            break
    assert read_clock(tmp_path) is not None
    assert not (tmp_path / "elsewhere").exists()
    file.close()
    assert not (tmp_path / CLOCK).exists()


def test_ctrl_c_at_any_line_of_its_beginning_leaves_a_file_that_closes(tmp_path: Path) -> None:
    clock = RunClock()
    clock.begin()
    for line in itertools.count():
        file = ClockFile(OutputFolder(tmp_path), clock)
        with InterruptAt(clock_file, line) as interrupt:
            file.begin()
        file.close()
        assert not (tmp_path / CLOCK).exists()
        if not interrupt.came:
            break
    assert line > 3
