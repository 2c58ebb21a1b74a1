"""Models of transformers of every family train, resume to the same bits, and are read back by their own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.trainer.model_families import FAMILIES, Family
from tests.trainer.small import arguments, weights_hash

from windlass import Trainer

# One of each kind; SegFormer installs hooks at its first forward.
QUICK = {"llama", "mixtral", "bert", "segformer", "yolos"}


def trainer_of(family: Family, model: Any, folder: Path) -> Trainer:
    args = arguments(folder, save_strategy="steps", save_steps=2, logging_steps=1, learning_rate=0.01)
    rows = [family.row(index) for index in range(12)]
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:6], data_collator=family.collate)


def losses_of(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_trains_resumes_and_is_read_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.build()
    before = weights_hash(model)
    whole = trainer_of(family, model, tmp_path)
    whole.train()
    assert weights_hash(model) != before
    loss = whole.evaluate()["eval_loss"]

    resumed = trainer_of(family, family.build(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights_hash(resumed.model) == weights_hash(model)
    assert losses_of(resumed) == losses_of(whole)

    cls = getattr(transformers, family.model)
    read, said = cls.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    assert trainer_of(family, read, tmp_path / "read").evaluate()["eval_loss"] == loss
