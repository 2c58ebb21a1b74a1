"""Two runs in one output folder: the second is refused before it writes, and what the first saves is whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import Started
from tests.trainer.background_cases import Weights, trainer_of

from windlass import ConfigError, TrainerCallback
from windlass.checkpoint import run_lock
from windlass.checkpoint.run_lock import LOCK_NAME
from windlass.checkpoint.store import Store

SCRIPT = Path(__file__).parent / "holding_run.py"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "GRACE", 0.2)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Started]:
    """A run of another process that saves at every update, with a limit, and waits after the third."""
    with Started(SCRIPT, tmp_path) as process:
        assert any("saved the third" in line for line in iter(process.stdout.readline, ""))
        yield process


def run(folder: Path, *callbacks: TrainerCallback, steps: int = 6) -> Any:
    return trainer_of(folder, *callbacks, max_steps=steps, save_steps=1, save_total_limit=2, logging_steps=1)


def test_the_second_run_is_refused_and_the_first_goes_on(tmp_path: Path, first: Started) -> None:
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    for resume in (False, True):
        second = run(tmp_path)
        with pytest.raises(ConfigError, match=rf"output_dir.*another run is writing to it.*pid {first.pid},"):
            second.train(resume_from_checkpoint=resume)
        assert second.state.global_step == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows
    second.evaluate()  # which needs no lock
    print("go on", file=first.stdin)
    code, said = first.end()
    assert code == 0
    assert "done\n" in said
    assert Store(tmp_path).newest_verified() == (tmp_path / "checkpoint-6", [])
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_killed_run_is_resumed_at_once(tmp_path: Path, first: Started) -> None:
    first.send_signal(signal.SIGKILL)
    resumed = run(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    clean = run(tmp_path / "clean", weights := Weights())
    clean.train()
    assert (resumed.model.layer.weight == weights.after[6]).all()


class Raising(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (Path(args.output_dir) / LOCK_NAME).exists()
        if state.global_step == 3:
            raise self._error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_a_run_that_ended_in_an_error_can_be_started_again(error: BaseException, tmp_path: Path) -> None:
    trainer = run(tmp_path, Raising(error))
    with pytest.raises(type(error)):
        trainer.train()
    trainer.pop_callback(Raising)
    trainer.train(resume_from_checkpoint=True)
    again = run(tmp_path, steps=7)
    again.train(resume_from_checkpoint=True)
    assert Store(tmp_path).newest_verified() == (tmp_path / "checkpoint-7", [])
    assert not (tmp_path / LOCK_NAME).exists()


class Nested(TrainerCallback):
    """Starts another run of this process in the middle of one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with pytest.raises(ConfigError) as caught:
                run(self._folder).train()
            self.said = str(caught.value)


def test_a_second_run_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    nested = Nested(tmp_path)
    run(tmp_path, nested).train()
    assert f"pid {os.getpid()}" in nested.said
    assert Store(tmp_path).newest_verified() == (tmp_path / "checkpoint-6", [])


def test_a_run_whose_folder_another_one_took_saves_no_more(tmp_path: Path) -> None:
    """It was stopped on another machine for longer than a dead one is waited for."""

    other = run_lock.RunLock(tmp_path)

    class Taken(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (tmp_path / LOCK_NAME).unlink()
                other.acquire()

    with pytest.raises(run_lock.FolderInUse, match="in use by another run"):
        run(tmp_path, Taken()).train()
    assert Store(tmp_path).newest_verified()[0] == tmp_path / "checkpoint-2"


def test_a_save_outside_of_training_holds_the_folder_while_it_is_made(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    trainer.train()
    trainer._save_checkpoint(trainer.model)
    assert not (tmp_path / LOCK_NAME).exists()
    other = run_lock.RunLock(tmp_path)
    other.acquire()
    with pytest.raises(run_lock.FolderInUse):
        trainer._save_checkpoint(trainer.model)
    other.release()
