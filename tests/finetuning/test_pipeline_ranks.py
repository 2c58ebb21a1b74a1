"""Fine-tuning on ranks that divide layers: text and preferences have the reports of one process, and a run that was
killed ends with the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import failure_on_ranks, on_ranks
from tests.finetuning import small, test_dpo_ranks, test_preference_ranks, test_several_ranks
from tests.finetuning.preferences import pairs, settings
from tests.trainer.resume_cases import kill

from windlass.compat.plugins import ParallelismConfig, PipelineParallelConfig
from windlass.core.errors import ConfigError
from windlass.finetuning.dpo_trainer import DPOTrainer
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.kto_trainer import KTOTrainer

pytest.importorskip("transformers")
CASES: dict[str, dict[str, Any]] = {
    # The second update has one micro-batch, of which the schedule makes two.
    "packed": {"lora": False, "packing": True, "layers": 4},
    "completions": {"lora": False, "packing": False, "completion_only_loss": True},
    "smoothed": {"lora": False, "packing": False, "label_smoothing_factor": 0.1},
    "dynamic": {"lora": False, "packing": False, "loss_type": "dft"},
    # The two ranks of the last stage, which divide its rows, have the same figures.
    "divided": {"lora": False, "packing": False},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "reference": {"precompute_ref_log_probs": True, "ld_alpha": 0.5},
    "adapter": {"precompute_ref_log_probs": True, "lora": True, "loss_type": ["ipo"]},
    "another model": {
        "precompute_ref_log_probs": True,
        "given": True,
        "tied": True,
        "loss_type": ["sigmoid", "sft"],
    },
}
_JUDGED = {"kind": "kto", "loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}
SINGLE: dict[str, dict[str, Any]] = {
    "judged": _JUDGED,
    "judged by a tied model": {**_JUDGED, "tied": True, "undesirable_weight": 1.3},
    "judged by an adapter": {**_JUDGED, "lora": True},
    "scored": {"kind": "reward", "center_rewards_coefficient": 0.01},
    "scored by an adapter": {"kind": "reward", "lora": True},
}
SCHEDULES = {
    "packed": "Interleaved1F1B",
    "completions": "GPipe",
    "smoothed": "GPipe",
    "dynamic": "1F1B",
    "divided": "1F1B",
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        "packed",
        "smoothed",
        "divided",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("completions", "dynamic")),
    ],
)
def test_two_stages_are_one_process(tmp_path: Path, name: str) -> None:
    """In an evaluation too, with losses that the model's own forward does not have."""
    ranks = on_ranks(4 if name == "divided" else 2, in_stages, tmp_path, name)
    alone = test_several_ranks.figures(tmp_path / "alone", **CASES[name])
    for found in ranks:
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.dist
def test_preferences_in_two_stages_are_one_process(tmp_path: Path) -> None:
    """Losses, norms and all figures, with the reference that the stages compute before training."""
    pytest.importorskip("peft")
    ranks = on_ranks(2, preferences, tmp_path, environ={"WINDLASS_HOME": str(tmp_path)})
    for name in (*PREFERENCES, *SINGLE):
        if name in PREFERENCES:
            alone = test_dpo_ranks.figures(tmp_path / "alone" / name, **PREFERENCES[name])
        else:
            trainer = test_preference_ranks.trained(tmp_path / "alone" / name, **SINGLE[name])
            alone = test_preference_ranks.reports(trainer)
        for rank, everything in enumerate(ranks):
            found = everything[name]
            # In the first update the model is the reference: which answer it prefers is rounding.
            for reported in (found[0], alone[0]):
                reported.pop("rewards/accuracies", None)
            for ours, theirs in zip(found, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12), (name, rank)


@pytest.mark.dist
@pytest.mark.parametrize("rank", ["1", pytest.param("all", marks=pytest.mark.slow)])
def test_preferences_of_killed_stages_end_with_the_same_bits(tmp_path: Path, rank: str) -> None:
    """One rank, or all of them, are killed before the update of the third step is made."""
    homes = {name: {"WINDLASS_HOME": str(tmp_path / name)} for name in ("whole", "killed")}
    whole = on_ranks(2, killed, tmp_path / "whole", "", environ=homes["whole"])
    failure_on_ranks(2, killed, tmp_path / "killed", rank, environ=homes["killed"])
    saved = {path.name for path in (tmp_path / "killed").glob("checkpoint-*")}
    assert "checkpoint-1" in saved < {"checkpoint-1", "checkpoint-2", "checkpoint-3"}, (
        "the second may not be whole yet"
    )
    assert on_ranks(2, killed, tmp_path / "killed", "", environ=homes["killed"]) == whole
    assert len(whole[0][1]) == 4, "the reports of all updates"


# --- what each rank runs ----------------------------------------------------------------------------------------------


def preferences(folder: Path) -> dict[str, Any]:
    layout = ParallelismConfig(pp_size=2)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "parallelism_config": layout}
    found = {
        name: test_dpo_ranks.figures(folder / name, **sizes, **case) for name, case in PREFERENCES.items()
    }
    for name, case in SINGLE.items():
        trainer = test_preference_ranks.trained(folder / name, **sizes, **case)
        found[name] = test_preference_ranks.reports(trainer)
    options = {"train_dataset": pairs(), "processing_class": small.tokenizer()}
    for field, trainer_of, args in (
        ("precompute_ref_log_probs", DPOTrainer, settings(folder / "dpo", parallelism_config=layout)),
        ("loss_type", KTOTrainer, settings(folder / "kto", KTOConfig, parallelism_config=layout)),
    ):
        with pytest.raises(ConfigError, match=field):
            trainer_of(small.model(), args=args, **options)
    return found


def killed(folder: Path, rank: str) -> list[Any]:
    """Weights and reports of four updates, of which each is saved; a run that was killed is continued."""
    args = settings(
        folder, parallelism_config=ParallelismConfig(pp_size=2), per_device_train_batch_size=2,
        gradient_accumulation_steps=4, max_steps=4, save_strategy="steps", save_steps=1,
        precompute_ref_log_probs=True,
    )  # fmt: skip
    model = small.model(tie_word_embeddings=True)
    trainer = DPOTrainer(model, args=args, train_dataset=pairs(), processing_class=small.tokenizer())
    if rank:
        trainer.add_callback(kill("on_pre_optimizer_step", 2, only_rank=None if rank == "all" else int(rank)))
    trainer.train(resume_from_checkpoint="auto")
    return test_preference_ranks.bits(trainer)


def in_stages(folder: Path, name: str) -> list[dict[str, float]]:
    handler = PipelineParallelConfig(SCHEDULES[name])
    layout = ParallelismConfig(pp_size=2, pp_handler=handler, cp_size=2 if name == "divided" else 1)
    return test_several_ranks.figures(
        folder / name, per_device_train_batch_size=2, parallelism_config=layout, **CASES[name]
    )
