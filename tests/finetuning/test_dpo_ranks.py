"""Preferences on two ranks with accumulation: losses, norms and all figures are those of one process, to 1e-10."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning import small
from tests.finetuning.preferences import moved, pairs, settings

from windlass.finetuning.dpo_trainer import DPOTrainer

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.dist
def test_two_ranks_are_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    found, _ = on_ranks(2, main, tmp_path)
    for name, case in CASES.items():
        alone = figures(tmp_path / name / "alone", **case)
        split = figures(
            tmp_path / name / "split", per_device_train_batch_size=2, gradient_accumulation_steps=4, **case
        )
        for other in (split, *(found[f"{name} {way}"] for way in WAYS)):
            for ours, theirs in zip(other, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12), name
    # Of both datasets by two ranks in two ways, and by one process in batches of two sizes; evaluations have one.
    assert len(list((tmp_path / "home" / "reference").iterdir())) == 7, "none used what others had rounded"


# --- what each rank runs ----------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "pairs": {},
    "mixture": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "adapter": {"lora": True, "loss_type": ["ipo"]},
    "shared": {"padding_free": True, "loss_type": ["sigmoid", "sft"], "optim": "sgd"},
    "precomputed": {"precompute_ref_log_probs": True, "ld_alpha": 0.5},
}
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": {"fsdp": "full_shard"}}


def figures(
    folder: Path, *, lora: bool = False, tied: bool = False, given: bool | None = None, **changes: Any
) -> list[dict[str, float]]:
    """The reports of two updates of eight pairs and of an evaluation, on any number of ranks.

    Args:
        given: a second model is the reference; by default unless there is an adapter, or it is precomputed.
    """
    import peft

    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {"per_device_train_batch_size": 8 if world == 1 else 2, "gradient_accumulation_steps": world}
    args = settings(
        folder,
        train_sampling_strategy="sequential",
        max_steps=2,
        per_device_eval_batch_size=2,
        **{**sizes, **changes},
    )
    given = not (lora or "precompute_ref_log_probs" in changes) if given is None else given
    model, other = (small.model(tie_word_embeddings=tied).double() for _ in range(2))
    trainer = DPOTrainer(
        model, moved(other) if given else None, args,
        train_dataset=pairs(), eval_dataset=pairs(7), processing_class=small.tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear") if lora else None,
    )  # fmt: skip
    trainer.train()
    found = [row for row in trainer.state.log_history if "loss" in row]
    evaluated = trainer.evaluate()
    skipped = ("runtime", "per_second", "epoch", "learning_rate")
    return [
        {n: v for n, v in row.items() if not any(part in n for part in skipped)}
        for row in (*found, evaluated)
    ]


def main(folder: Path) -> dict[str, Any]:
    return {
        f"{name} {way}": figures(folder / name / way, **case, **options)
        for name, case in CASES.items()
        for way, options in WAYS.items()
    }
