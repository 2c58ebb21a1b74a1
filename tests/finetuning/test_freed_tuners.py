"""A trainer of a language model that a script drops is freed at once, with its models, without a search for cycles."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.finetuning.small import model, tokenizer

from windlass import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

TEXTS = [{"text": "the cat sat on a mat"}, {"text": "my quiet green field near one old red barn"}] * 4
PAIRS = [{"prompt": "the cat", "chosen": "sat on a mat", "rejected": "run past"}] * 8


pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.parametrize(
    ("trainer_class", "config", "data"), [(SFTTrainer, SFTConfig, TEXTS), (DPOTrainer, DPOConfig, PAIRS)]
)
def test_one_that_trained_evaluated_and_saved(
    trainer_class: Any, config: Any, data: list[Any], tmp_path: Path
) -> None:
    """With a reference in mixed precision, as is the default of preferences."""
    args = config(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=2, bf16=True,
        report_to="none", disable_tqdm=True, use_cpu=True
    )  # fmt: skip
    trainer = trainer_class(
        model(), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    found: list[weakref.ref[Any]] = [weakref.ref(trainer), weakref.ref(trainer.optimizer)]
    for one in (trainer.model, getattr(trainer, "ref_model", None)):
        if one is not None:
            found += [weakref.ref(one), *map(weakref.ref, one.parameters())]
    del trainer, one
    assert [type(kept).__name__ for reference in found if (kept := reference()) is not None] == []
