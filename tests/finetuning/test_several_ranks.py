"""Fine-tuning on several ranks: the same losses, norms and figures as in one process, replicated and sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning import small

from windlass import SFTTrainer

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.dist
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    found, _ = on_ranks(2, main, tmp_path)
    for name, case in CASES.items():
        alone = figures(tmp_path / name / "alone", **case)
        for way in WAYS:
            for ours, theirs in zip(found[f"{name} {way}"], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-5), (name, way)
        written = {path.name for path in (tmp_path / name / "sharded").iterdir()}
        assert ("adapter_model.safetensors" in written) == case["lora"]


# --- what each rank runs ----------------------------------------------------------------------------------------------


SHARDED: dict[str, Any] = {"fsdp": "full_shard"}


def adapter() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def figures(
    folder: Path,
    *,
    lora: bool,
    packing: bool,
    streaming: bool = False,
    samples: int = 24,
    layers: int = 2,
    **changes: Any,
) -> list[dict[str, float]]:
    """The reports of two updates over the same samples, on any number of ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = small.arguments(
        folder, packing=packing, max_length=32, train_sampling_strategy="sequential", logging_steps=1, max_steps=2,
        gradient_accumulation_steps=2, **{"per_device_train_batch_size": 2 // world, **changes},
    )  # fmt: skip
    rows = small.table(small.prompts(samples))
    train = rows.to_iterable_dataset() if streaming else rows
    model = small.model(num_hidden_layers=layers)
    trainer = SFTTrainer(
        model, args, train_dataset=train, eval_dataset=rows, processing_class=small.tokenizer(),
        peft_config=adapter() if lora else None,
    )  # fmt: skip
    trainer.train()
    found = [row for row in trainer.state.log_history if "loss" in row]
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    evaluated = trainer.evaluate()
    trainer.save_model()
    kept = [{name: row[name] for name in names} for row in found]
    return [*kept, {name: evaluated[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")}]


CASES: dict[str, dict[str, Any]] = {
    "whole": {"lora": False, "packing": False},
    "adapter": {"lora": True, "packing": True},
    "stream": {"lora": True, "packing": True, "streaming": True},
    # In the second update a rank has no sample: what it computes for the others counts nowhere.
    "uneven": {"lora": False, "packing": False, "samples": 5},
}
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": SHARDED}


def main(folder: Path) -> dict[str, Any]:
    return {
        f"{name} {way}": figures(folder / name / way, **case, **options)
        for name, case in CASES.items()
        for way, options in WAYS.items()
    }
