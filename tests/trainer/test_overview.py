"""What a Trainer shows of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from windlass import SFTTrainer, Trainer, TrainingArguments
from windlass.core.events import TrainerState
from windlass.trainer.overview import facts, html


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        raise TypeError("not known")


def test_facts() -> None:
    model = nn.Linear(1000, 2)
    model.bias.requires_grad = False
    found = facts(model, [1] * 1200, {"a": [1], "<b>": Stream()}, TrainerState(), device="cpu")
    assert found == {
        "model": "Linear (2,002 parameters, 2,000 trainable)",
        "train_dataset": "1,200 samples",
        "eval_dataset": "a: 1 samples, <b>: Stream",
        "progress": "not started",
        "device": "cpu",
    }
    assert "&lt;b&gt;: Stream" in html("Trainer", found)
    assert html("Trainer", found).count("<tr>") == 5


def test_repr_of_a_trainer(tmp_path: Path) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return {"loss": super().forward(x).mean()}

    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True)
    trainer = Trainer(Model(2, 1), args, train_dataset=[{"x": torch.ones(2)}] * 4)
    begin = "Trainer(model: Model (3 parameters, 3 trainable), train_dataset: 4 samples, progress: "
    assert repr(trainer) == f"{begin}not started, device: cpu, output_dir: {tmp_path})"
    trainer.train()
    assert repr(trainer).startswith(f"{begin}2 of 2 updates")
    assert "2 of 2 updates" in trainer._repr_html_()


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_an_unfinished_one_has_a_repr(kind: type[Trainer]) -> None:
    assert repr(kind.__new__(kind)).startswith("<windlass")
