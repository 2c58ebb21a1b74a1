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
    """Ends the first run behind its first save; a later one finds no thread of it."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.still_writing: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        names = [thread.name for thread in threading.enumerate()]
        self.still_writing = [name for name in names if name.startswith("windlass-save")]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.error is not None and state.global_step == 2:
            error, self.error = self.error, None
            raise error


def test_a_script_that_exits_has_its_last_checkpoint(folder: Path) -> None:
    with pytest.raises(SystemExit):
        trainer_of(folder, Leaving(SystemExit(3))).train()
    assert [info.step for info in Store(folder).list()] == [2]


def test_a_run_behind_one_that_was_stopped_at_once_has_the_folder_for_itself(folder: Path) -> None:
    leaving = Leaving(KeyboardInterrupt())
    with SlowDisk(until=100) as disk:
        trainer = trainer_of(folder, leaving, max_steps=4)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert [info.step for info in Store(folder).list()] == [], "it was not waited for"
        threading.Timer(0.5, disk._open.set).start()
        trainer.train(resume_from_checkpoint="auto")
    assert leaving.still_writing == []
    assert [step for step, _, _ in trainer.notes] == [2, 4], "step 2 was not made again"
