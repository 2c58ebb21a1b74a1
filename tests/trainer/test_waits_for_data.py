"""What counts as a wait for data: every one of them, in runs, evaluations and loops, and nothing between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Accelerator, Trainer
from windlass.dist.beacon import beacon
from windlass.dist.watchdog import OtherRanks, Watchdog


def waits_here() -> bool:
    """Whether a process that stays where it calls this is ended after the limit of its waits."""

    class Dog(Watchdog):
        def _end(self, mark: Any) -> None:
            raise TimeoutError

    dog = Dog(beacon(), OtherRanks({}, 60), report_after=60, limit=1800)
    dog.look(0)
    try:
        dog.look(1801)
    except TimeoutError:
        return True
    return False


class Looking(torch.utils.data.Dataset[dict[str, Any]]):
    """Notes for each sample whether reading it is a wait."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.found.append(waits_here())
        return rows(16)[index]


class LookingNet(Net):
    """Notes for each forward whether it is a wait."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.found = [*getattr(self, "found", []), waits_here()]
        return super().forward(x, labels)


def test_each_read_of_a_run_and_of_its_evaluation_is_one_and_no_forward(tmp_path: Path) -> None:
    data, model = Looking(), LookingNet()
    options = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=data, eval_dataset=data)
    trainer.train()
    assert data.found == [True] * (16 + 2 * 16)
    assert model.found == [False] * (4 + 2 * 4)


def test_forwards_of_an_evaluation_whose_data_workers_read_are_none(tmp_path: Path) -> None:
    model = LookingNet()
    trainer = Trainer(model, arguments(tmp_path, dataloader_num_workers=1), eval_dataset=rows(8))
    trainer.evaluate()
    assert model.found == [False, False]


def test_what_a_script_does_after_a_read_failed_is_none(tmp_path: Path) -> None:
    class Broken(Looking):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise OSError("stale file handle")

    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=Broken())
    with pytest.raises(OSError, match="stale"):
        trainer.train()
    assert not waits_here()


def test_what_a_loop_does_with_its_batches_and_after_the_last_is_none() -> None:
    data = Looking()
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(data, batch_size=4))
    assert [waits_here() for _ in loader] == [False] * 4
    assert not waits_here()
    assert all(data.found)
