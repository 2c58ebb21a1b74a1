"""An SFTTrainer on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.finetuning import small

from windlass import SFTTrainer


def trainer_of(folder: Path, rows: Any, model: Any = None, **changes: Any) -> SFTTrainer:
    ours = {
        name: changes.pop(name)
        for name in (
            "eval_dataset",
            "formatting_func",
            "peft_config",
            "data_collator",
            "compute_loss_func",
            "optimizers",
        )
        if name in changes
    }
    rows = small.table(rows) if type(rows) is list else rows
    return SFTTrainer(
        small.model() if model is None else model, small.arguments(folder, **changes), train_dataset=rows,
        processing_class=small.tokenizer(), **ours,
    )  # fmt: skip
