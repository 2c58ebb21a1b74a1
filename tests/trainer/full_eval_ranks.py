"""Run on ranks: runs that are evaluated in few bits once they have ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.trainer.adapter_cases import base, rows, stretch
from tests.trainer.small import arguments

from windlass import Trainer, load_weights
from windlass.dist.sharded import is_sharded

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"fsdp": "full_shard"},
    "kept": {"fsdp": "shard_grad_op", "bf16": True},
    "offloaded": {"fsdp": "full_shard offload"},
}


def evaluated(folder: Path, cast: str, **strategy: Any) -> dict[str, Any]:
    """Losses and dtypes after training, and after what follows an evaluation."""
    trainer = stretch(
        folder, 2, False, model=base(), max_steps=2, per_device_train_batch_size=4 // WORLD, **strategy,
        **{f"{cast}_full_eval": True},
    )  # fmt: skip
    found = losses_of(trainer)
    trainer.save_model()
    return {
        **found,
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "sharded": any(is_sharded(p) for p in trainer.model.parameters()),
    }


def reread(folder: Path, cast: str, **arguments_of_run: Any) -> dict[str, Any]:
    """The losses of the weights that a run has saved, in one process."""
    model = base()
    load_weights(folder, model)
    return losses_of(
        Trainer(model, arguments(folder / "reread", **arguments_of_run, **{f"{cast}_full_eval": True}))
    )


def losses_of(trainer: Trainer) -> dict[str, Any]:
    losses = [trainer.evaluate(rows()[:7])["eval_loss"] for _ in range(2)]
    return {"losses": losses, "predicted": trainer.predict(rows()[:3]).metrics["test_loss"]}


def main(folder: Path) -> dict[str, Any]:
    return {
        f"{way} {cast}": evaluated(folder / f"{way} {cast}", cast, **strategy)
        for way, strategy in WAYS.items()
        for cast in ("bf16", "fp16")
    }
