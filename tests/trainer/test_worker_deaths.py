"""A data worker is killed, as the system does when memory runs out; the same Trainer resumes to the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.preemption_cases import At
from tests.trainer.resume_cases import Case, Samples, build, run, same_run

from windlass.core.errors import WorkerError

ARGUMENTS = {"dataloader_num_workers": 2, "eval_strategy": "epoch"}


class Deadly(Samples):
    """Reading is the death of the process, as long as there is a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


PLACES = {"training": ("on_epoch_begin", 5), "evaluation": ("on_epoch_end", 5)}


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_whose_worker_was_killed_resumes_to_the_same_bits(tmp_path: Path, persistent: bool) -> None:
    case = Case(ARGUMENTS | {"dataloader_persistent_workers": persistent})
    whole = run(tmp_path / "whole", case)
    for purpose, (event, step) in PLACES.items():
        file, folder = tmp_path / f"kill-{purpose}", tmp_path / purpose
        once = [file.touch]
        trainer = build(folder, case, At(event, step, lambda once=once: once and once.pop()()))  # type: ignore[misc]
        deadly = Deadly(file)
        if purpose == "training":
            trainer.train_dataset = deadly
        else:
            trainer.eval_dataset = deadly
        with pytest.raises(
            WorkerError, match=rf"was killed by SIGKILL while it read samples .* for {purpose}"
        ):
            trainer.train()
        file.unlink()
        trainer.train(resume_from_checkpoint=True)
        same_run(folder, trainer, tmp_path / "whole", whole)
