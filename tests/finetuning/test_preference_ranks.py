"""Reward models, and answers that are judged one by one, on two ranks with accumulation: losses, norms and figures are
those of one process, to 1e-10, and a run that was cut ends with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from tests.finetuning import small
from tests.finetuning.preferences import SHORT, moved, pairs

from windlass import TrainerCallback
from windlass.core.errors import ModelError
from windlass.data.collate_branches import DataCollatorForUnpairedPreference
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.dpo_trainer import DPOTrainer
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.kto_trainer import KTOTrainer
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.reward_trainer import RewardTrainer

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.dist
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks_are_one_process_and_resume_to_the_bit(tmp_path: Path, few: bool) -> None:
    launch(2, Path(__file__), tmp_path, int(few))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found
    for name, case in CASES.items():
        ways = [way for way in WAYS if f"{name} {way}" in found]
        if not ways:
            continue
        alone = reports(trained(tmp_path / name / "alone", **case))
        for way in ways:
            for ours, theirs in zip(found[f"{name} {way}"], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12), (name, way)
            whole, resumed = found[f"{name} {way} bits"]
            assert whole == resumed, (name, way)


@pytest.mark.dist
def test_ranks_with_unequal_updates_estimate_one_divergence(tmp_path: Path) -> None:
    said = launch(2, Path(__file__), tmp_path, "unequal")
    assert "loss is a plain mean" not in said, "what a script is asked to declare, its trainer declares"
    found = json.loads((tmp_path / "found.json").read_text())
    trainer = trainer_of(
        tmp_path / "alone", "kto", loss_type="kto", rows=UNEQUAL, per_device_train_batch_size=2
    )
    rows = [trainer.train_dataset[at] for at in range(UNEQUAL)]
    # The last update: two micro-batches of the first rank, and one of the second.
    expected, divergences = [], []
    for parts in ([rows[8:10], rows[10:12]], [rows[12:13]]):
        batches = [trainer.data_collator(part) for part in parts]
        # A batch of one row has the answer of no other row.
        others = [ratios(trainer, batch, "KL_") for batch in batches if len(batch["label"]) > 1]
        divergence = torch.cat(others).mean().clamp(min=0) if others else torch.zeros(())
        own = torch.cat([ratios(trainer, batch, "") for batch in batches])
        sign = torch.cat([2.0 * batch["label"].double() - 1.0 for batch in batches])
        expected += (1 - torch.sigmoid(0.1 * sign * (own - divergence))).tolist()
        divergences += [float(divergence)] * len(own)
    assert found["loss"] == pytest.approx(sum(expected) / 5, rel=1e-10)
    assert found["kl"] == pytest.approx(sum(divergences) / 5, rel=1e-10) != 0.0


@pytest.mark.dist
def test_a_run_goes_on_in_another_layout_of_as_many_ranks(tmp_path: Path) -> None:
    """What each rank has of losses, figures and a moving reference between two reports is put together again."""
    launch(2, Path(__file__), tmp_path, "layouts")
    found = json.loads((tmp_path / "found.json").read_text())
    for name in LAYOUTS:
        whole, resumed = found[name]
        for ours, theirs in zip(resumed, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "moving": {"fsdp": "full_shard", "sync_ref_model": True, "ref_model_sync_steps": 2},
    "tensor": {"parallelism_config": {"tp_size": 2}, "per_device_train_batch_size": 4},
}
UNEQUAL = 13  # rows: of an epoch of two updates of two micro-batches of two rows on two ranks


def ratios(trainer: Any, batch: dict[str, Any], prefix: str) -> torch.Tensor:
    """log(model / reference) of each answer, from whole logits."""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
    answers = batch[f"{prefix}completion_mask"][:, 1:]
    sums = []
    with torch.no_grad():
        for model in (trainer.model, trainer.ref_model):
            logs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
            sums.append((logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * answers).sum(1))
    return sums[0] - sums[1]


# --- what each rank runs ----------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "reward": {"kind": "reward", "center_rewards_coefficient": 0.01},
    "reward adapter": {"kind": "reward", "lora": True},
    "judged": {"kind": "kto", "loss_type": "apo_zero_unpaired", "undesirable_weight": 1.3, "accumulation": 2},
    "divergence": {"kind": "kto", "loss_type": "kto", "accumulation": 1},
    "judged adapter": {"kind": "kto", "loss_type": "apo_zero_unpaired", "lora": True},
}
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": {"fsdp": "full_shard"}}
FEW = ("reward sharded", "divergence replicated", "judged adapter sharded")


def judged(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if at % 3 else "rejected"],
            "label": bool(at % 3),
        }
        for at, row in enumerate(pairs(count))
    ]


class Halves(DataCollatorForUnpairedPreference):
    """What two ranks make of the two halves of a batch: prompts with the answers of other rows of the same half."""

    def _sequences(self, prompts: list[Any], answers: list[Any], return_tensors: str) -> Any:
        if len(answers) == 8 and answers != self.own:
            answers = [answer for half in (self.own[:4], self.own[4:]) for answer in (half[-1], *half[:-1])]
        return super()._sequences(prompts, answers, return_tensors)

    def __call__(self, features: Any, return_tensors: str | None = None) -> Any:
        self.own = [sample["completion_ids"] for sample in features]
        return super().__call__(features, return_tensors)


def trainer_of(
    folder: Path,
    kind: str,
    *,
    lora: bool = False,
    accumulation: int = 2,
    precise: bool = True,
    tied: bool = False,
    rows: int = 24,
    **changes: Any,
) -> Any:
    """A trainer whose updates have 8 rows on any number of ranks."""
    import peft
    from transformers import LlamaForSequenceClassification

    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        **SHORT, "max_steps": 4, "train_sampling_strategy": "sequential", "per_device_eval_batch_size": 2,
        "per_device_train_batch_size": 8 if world == 1 else 4 // accumulation,
        "gradient_accumulation_steps": 1 if world == 1 else accumulation, "logging_steps": 2,
        **changes,
    }  # fmt: skip
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
    dtype = torch.float64 if precise else torch.float32
    torch.manual_seed(0)
    if kind == "reward":
        margins = [{**row, "margin": 0.1 * at} for at, row in enumerate(pairs(rows))]
        scorer = LlamaForSequenceClassification(small.config(num_labels=1, pad_token_id=None)).to(dtype)
        # Set now: transformers cannot clear the row of padding of an embedding that ZeRO-3 divides.
        scorer.config.pad_token_id = 0
        return RewardTrainer(
            scorer, RewardConfig(str(folder), **options), train_dataset=margins, eval_dataset=margins[:7],
            processing_class=small.tokenizer(), peft_config=adapter,
        )  # fmt: skip
    model, other = (small.model(tie_word_embeddings=tied).to(dtype) for _ in range(2))
    reference = None if lora else moved(other)
    if kind == "dpo":
        return DPOTrainer(
            model, reference, DPOConfig(str(folder), **options), None, pairs(24), pairs(7), small.tokenizer(),
            peft_config=adapter,
        )  # fmt: skip
    collator = Halves(0, 64) if world == 1 and changes["loss_type"] == "kto" else None
    return KTOTrainer(
        model, reference, KTOConfig(str(folder), **options), collator, judged(rows), judged(8), small.tokenizer(),
        peft_config=adapter,
    )  # fmt: skip


def trained(folder: Path, *, resume: bool = False, cut: bool = False, **case: Any) -> Any:
    case = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, **case}
    trainer = trainer_of(folder, **case)
    if cut:
        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class Stop(TrainerCallback):
    """Ends a run after its third update, between two reports."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


class LogsAlone(TrainerCallback):
    """Logs a loss of its own on the main process, which the other ranks know nothing of."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.trainer.log({"loss": 1.0})


def reports(trainer: Any) -> list[dict[str, float]]:
    """The reports of four updates of eight rows, and of an evaluation, unless it estimates a divergence by batches."""
    found = [row for row in trainer.state.log_history if "loss" in row]
    estimates = getattr(trainer.args, "loss_type", "") == "kto"
    evaluated = {} if estimates else trainer.evaluate()
    skipped = ("runtime", "per_second", "epoch", "learning_rate")
    return [
        {n: v for n, v in row.items() if not any(part in n for part in skipped)}
        for row in (*found, evaluated)
    ]


def bits(trainer: Any) -> list[Any]:
    """A hash of this rank's weights, and the reports."""
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().numpy().tobytes())
    return [digest.hexdigest(), [row for row in trainer.state.log_history if "loss" in row]]


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    if sys.argv[2] == "unequal":
        options = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0, "logging_steps": 1}
        trainer = trainer_of(folder / "out", "kto", loss_type="kto", rows=UNEQUAL, **options)
        trainer.add_callback(LogsAlone(trainer))
        trainer.train()
        if trainer.is_world_process_zero():
            found = [row for row in trainer.state.log_history if "kl" in row][1]
            (folder / "found.json").write_text(json.dumps(found))
        return
    if sys.argv[2] == "layouts":
        for name, case in LAYOUTS.items():
            place = folder / name
            first = {key: case[key] for key in case if key.startswith(("sync", "ref"))}
            whole = reports(trained(place / "whole", kind="dpo", **first))
            trained(place / "cut", kind="dpo", cut=True, **first)
            found[name] = [whole, reports(trained(place / "cut", kind="dpo", resume=True, **case))]
        # Before the first update, though the reference would move after as many as the default is.
        with pytest.raises(ModelError, match="without tp_size"):
            trained(folder / "refused", kind="dpo", sync_ref_model=True, **LAYOUTS["tensor"])
        if torch.distributed.get_rank() == 0:
            (folder / "found.json").write_text(json.dumps(found))
        return
    few = bool(int(sys.argv[2]))
    for name, case in CASES.items():
        for way, options in WAYS.items():
            if few != (f"{name} {way}" in FEW):
                continue
            place = folder / name / way
            whole = trained(place / "whole", **case, **options)
            found[f"{name} {way} bits"] = [bits(whole)]
            found[f"{name} {way}"] = reports(whole)
            trained(place / "cut", cut=True, **case, **options)
            resumed = trained(place / "cut", resume=True, **case, **options)
            found[f"{name} {way} bits"].append(bits(resumed))
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
