"""Runs that are left in ways that are no errors, while a checkpoint of theirs is being written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.background_cases import SlowDisk, trainer_of

from windlass import TrainerCallback
from windlass.checkpoint.store import Store


class Leaving(TrainerCallback):
    """Ends the first run behind its first save, and notes how much was written when each run began."""

    def __init__(self, error: BaseException, disk: SlowDisk | None = None) -> None:
        self.error: BaseException | None = error
        self.disk = disk
        self.written = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.written = 0 if self.disk is None else len(self.disk.writers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.error is not None and state.global_step == 2:
            error, self.error = self.error, None
            raise error


def test_a_script_that_exits_has_its_last_checkpoint(folder: Path) -> None:
    with pytest.raises(SystemExit):
        trainer_of(folder, Leaving(SystemExit(3))).train()
    assert [info.step for info in Store(folder).list()] == [2]


def test_a_run_behind_one_that_was_stopped_at_once_has_the_folder_for_itself(folder: Path) -> None:
    with SlowDisk(until=100) as disk:
        leaving = Leaving(KeyboardInterrupt(), disk)
        trainer = trainer_of(folder, leaving, max_steps=4)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert [info.step for info in Store(folder).list()] == [], "it was not waited for"
        threading.Timer(0.5, disk._open.set).start()
        trainer.train(resume_from_checkpoint="auto")
    assert leaving.written > 0, "the first save wrote nothing before the second run"
    assert "windlass-save-2" not in disk.writers[leaving.written :], (
        "the first save still wrote in the second run"
    )
    assert [step for step, _, _ in trainer.notes] == [2, 4], "step 2 was not made again"
