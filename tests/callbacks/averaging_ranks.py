"""Run on ranks: averages of weights that are sharded over ranks, in one run and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import EMACallback, Trainer
from windlass.dist.sharded import is_sharded, whole


def train(folder: Path, steps: int, resume: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    options |= {"fsdp": "full_shard", "lr_scheduler_type": "constant", "learning_rate": 0.3}
    args = arguments(folder, max_steps=steps, per_device_train_batch_size=2, **options)
    data = rows(24)
    trainer = Trainer(
        Net().double(), args, train_dataset=doubled(data), eval_dataset=doubled(data)[:8], callbacks=[EMACallback(0.9)]
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    assert all(map(is_sharded, trainer.model.parameters()))
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"weights": [whole(p).flatten().tolist() for p in trainer.model.parameters()], "loss": losses[-1]}


def doubled(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "x": row["x"].double()} for row in data]


def main(folder: Path) -> dict[str, Any]:
    clean = train(folder / "a", 6)
    train(folder / "b", 3)
    return {"clean": clean, "again": train(folder / "b", 6, resume=True)}
