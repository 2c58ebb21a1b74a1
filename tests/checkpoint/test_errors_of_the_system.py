"""Every operation of a save x every error of a system: it costs that checkpoint, and nothing else."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from tests.checkpoint.failing_system import ERRNOS, OPERATIONS, FailingSystem
from tests.checkpoint.faults import newest, save
from tests.checkpoint.test_background import begin, saver_of, until_it_ends

from windlass.checkpoint.background import Outcome


def save_in_background(root: Path, step: int) -> Path | None:
    saver = saver_of(root)
    outcome = until_it_ends(saver) if begin(saver, step) else Outcome(step, None)
    return outcome.folder


WAYS = (save, save_in_background)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_costs_at_most_that_checkpoint(operation: str, fast_disk: Path) -> None:
    """Each error meets another call of the operation."""
    save(fast_disk / "counted", 1)
    with FailingSystem(fast_disk / "counted", operation, errno.EIO) as system:
        save(fast_disk / "counted", 2)
    for index, number in enumerate(ERRNOS):
        if system.count == 0:
            continue
        at = 1 + index * system.count // len(ERRNOS)
        root = fast_disk / str(index)
        save(root, 1)
        with FailingSystem(root, operation, number, at):
            saved = WAYS[index % 2](root, 2)
        what = f"{errno.errorcode[number]} at call {at} of {operation}"
        assert newest(root) in ((1, 2) if saved is None else (2,)), what
        assert save(root, 3) == root / "checkpoint-3", what
        assert newest(root) == 3, what
        assert [path.name for path in root.iterdir()] == ["checkpoint-3"], what


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE])
def test_checkpoints_that_cannot_be_read_now_do_not_pass_for_older_ones(number: int, fast_disk: Path) -> None:
    """The next save would count from 1, and come before those that are there."""
    for step in (10, 20, 30):
        save(fast_disk, step, limit=None)
    for at in range(10, 34):
        with FailingSystem(fast_disk, "open", number, at, times=3):
            saved = save(fast_disk, 5, limit=None)
        # Where only the very last operations failed, what was dropped is complete nevertheless.
        assert newest(fast_disk) in ((30, 5) if saved is None else (5,)), at
        shutil.rmtree(fast_disk / "checkpoint-5", ignore_errors=True)
