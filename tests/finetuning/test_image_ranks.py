"""Images on several ranks: as in one process, replicated and sharded, also if the batch of a rank has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning import small, vision_families
from tests.finetuning.vision_families import family

from windlass import SFTTrainer

pytest.importorskip("transformers")


@pytest.mark.dist
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    found, _ = on_ranks(2, main, tmp_path)
    for name in NAMES:
        alone = figures(tmp_path / name / "alone", name)
        for way in WAYS:
            for ours, theirs in zip(found[f"{name} {way}"], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=5e-5), (name, way)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    """Rows with and without images: in one update, rank 0 has one and rank 1 has none, and in the next the reverse."""
    made: list[dict[str, Any]] = vision_families.rows(8)
    for at in (1, 2, 4, 5):
        made[at]["images"] = []
    return made


def figures(folder: Path, name: str, **changes: Any) -> list[dict[str, float]]:
    """The reports of four updates over the same samples, on any number of ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model, processor = family(name)
    args = small.arguments(
        folder, max_length=None, assistant_only_loss=True, train_sampling_strategy="sequential", max_steps=4,
        per_device_train_batch_size=2 // world, per_device_eval_batch_size=1, **changes,
    )  # fmt: skip
    trainer = SFTTrainer(model, args, train_dataset=rows(), eval_dataset=rows(), processing_class=processor)
    trainer.train()
    found = [row for row in trainer.state.log_history if "loss" in row]
    names = ("loss", "grad_norm", "entropy", "num_tokens")
    evaluated = trainer.evaluate()
    trainer.save_model()
    return [*({key: row[key] for key in names} for row in found), {"eval": evaluated["eval_loss"]}]


NAMES = ("llava", "qwen2.5-vl")
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": {"fsdp": "full_shard"}}


def main(folder: Path) -> dict[str, Any]:
    return {
        f"{name} {way}": figures(folder / name / way, name, **options)
        for name in NAMES
        for way, options in WAYS.items()
    }
