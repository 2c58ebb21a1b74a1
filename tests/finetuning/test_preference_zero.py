"""Preferences under the stages of ZeRO, with the reference as a second model: one process, up to rounding; resumed runs
continue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.finetuning import small
from tests.finetuning.preferences import pairs, settings
from tests.finetuning.test_preference_ranks import Stop, reports, trainer_of
from tests.zero.needed import needs_deepspeed
from tests.zero.runs import config

from windlass import DPOTrainer

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_are_one_process(tmp_path: Path, stage: int) -> None:
    found, _ = on_ranks(2, main, tmp_path, stage)
    for name, case in CASES.items():
        trainer = made(tmp_path / name / "alone", **case)
        trainer.train()
        for own in (found[name], found[f"{name} resumed"]):
            for ours, theirs in zip(own, reports(trainer), strict=True):
                assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), name


@pytest.mark.dist
@needs_deepspeed
@pytest.mark.parametrize(
    "stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_in_bf16_a_model_has_the_probabilities_of_its_reference_until_it_is_updated(
    stage: int, tmp_path: Path
) -> None:
    """The engine converts the weights, so those of the reference are converted too, in each way to compute it."""
    for precomputed in (False, True):
        row = on_ranks(1, first_report, tmp_path / str(precomputed), stage, precomputed)[0]
        assert (row["rewards/chosen"], row["rewards/rejected"]) == (0.0, 0.0)


# --- what each rank runs ----------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "pairs": {"kind": "dpo"},
    "pairs in a row": {"kind": "dpo", "padding_free": True},
    "precomputed": {"kind": "dpo", "precompute_ref_log_probs": True},
    "adapter": {"kind": "dpo", "lora": True},
    "reward": {"kind": "reward"},
    "judged": {"kind": "kto", "loss_type": "apo_zero_unpaired"},
}


def made(folder: Path, *, stage: int = -1, **case: Any) -> Any:
    options = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, **case, **config(stage)}
    return trainer_of(folder, precise=False, **options)


def run(folder: Path, stage: int, case: dict[str, Any], *, cut: bool = False, resume: bool = False) -> Any:
    """The reports of a run."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # While settings of stage 3 are known there, models are divided when they are made, with other weights.
    unset_hf_deepspeed_config()
    trainer = made(folder, stage=stage, **case)
    if cut:
        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return None if cut else reports(trainer)


def main(folder: Path, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = run(folder / name / "whole", stage, case)
        run(folder / name / "cut", stage, case, cut=True)
        found[f"{name} resumed"] = run(folder / name / "cut", stage, case, resume=True)
    return found


def first_report(folder: Path, stage: int, precomputed: bool) -> dict[str, float]:
    """What is logged of the first update of a model whose reference is a copy of it."""
    options: dict[str, Any] = {"bf16": True, "precompute_ref_log_probs": precomputed, **config(stage)}
    args = settings(folder, max_steps=1, **options)
    trainer = DPOTrainer(small.model(), args=args, train_dataset=pairs(8), processing_class=small.tokenizer())
    trainer.train()
    return dict(trainer.state.log_history[0])
