"""Values that are not finite: learned of at once, nothing saved after them, or the update skipped on every rank."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.nonfinite_cases import BAD, Fragile, Weights, faulty_on_both_ranks, samples, trainer_for
from torch import Tensor

from windlass import Trainer
from windlass.core.errors import NonFiniteError
from windlass.dist.sharded import whole

BAD_STEP = BAD // 2 + 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_raise_names_step_and_samples_and_saves_nothing_after(
    bad: float, accumulation: int, folder: Path
) -> None:
    watcher = Weights()
    trainer = trainer_for(folder, bad, watcher, gradient_accumulation_steps=accumulation)
    step = BAD // (2 * accumulation) + 1
    with pytest.raises(NonFiniteError, match=f"at step {step} .samples ") as caught:
        trainer.train()
    first = (step - 1) * 2 * accumulation
    for index in range(first, first + 2 * accumulation):
        assert f"{index}" in str(caught.value)
    saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    assert saved == list(range(1, step))
    assert len(watcher.after) == step - 1, "callbacks never hear of the end of that step"


def test_the_last_update_of_a_run_is_watched_too(folder: Path) -> None:
    trainer = trainer_for(folder, math.nan, Weights(), max_steps=BAD_STEP, save_strategy="no")
    with pytest.raises(NonFiniteError, match=f"at step {BAD_STEP}"):
        trainer.train()


def test_skip_leaves_the_weights_and_counts(folder: Path) -> None:
    watcher = Weights()
    trainer = trainer_for(folder, math.nan, watcher, nonfinite_policy="skip")
    trainer.train()
    assert trainer.state.global_step == 12
    assert watcher.after[BAD_STEP - 1] == watcher.after[BAD_STEP - 2], "that update changed the weights"
    assert all(a != b for i, (a, b) in enumerate(pairwise(watcher.after)) if i != BAD_STEP - 2)
    skips = [logs.get("skipped_updates", 0) for logs in watcher.logs if "loss" in logs]
    assert skips == [0] * (BAD_STEP - 1) + [1] * (12 - BAD_STEP + 1)
    assert all(math.isfinite(p) for p in watcher.after[-1])


def test_a_skipped_update_leaves_the_optimizer_too(folder: Path) -> None:
    """The moments of Adam would carry the NaN into every later update."""
    trainer = trainer_for(folder, math.nan, Weights(), nonfinite_policy="skip", weight_decay=0.1)
    trainer.train()
    assert trainer.optimizer is not None
    for state in trainer.optimizer.state.values():
        assert int(state["step"]) == 11
        assert all(bool(torch.isfinite(state[name]).all()) for name in ("exp_avg", "exp_avg_sq"))


def test_what_is_logged_is_what_was(folder: Path) -> None:
    """`logging_nan_inf_filter` never filters: the report of the bad step says nan."""
    watcher = Weights()
    trainer = trainer_for(folder, math.nan, watcher, nonfinite_policy="skip", logging_nan_inf_filter=True)
    trainer.train()
    losses = [logs["loss"] for logs in watcher.logs if "loss" in logs]
    norms = [logs["grad_norm"] for logs in watcher.logs if "loss" in logs]
    assert [i for i, value in enumerate(losses) if not math.isfinite(value)] == [BAD_STEP - 1]
    assert [i for i, value in enumerate(norms) if not math.isfinite(value)] == [BAD_STEP - 1]


class Exploding(Fragile):
    """The gradients of the eighth update do not fit fp16's range at any scale that the first seven left."""

    calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, out = super().forward(x, labels)
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 8:
                loss = loss * 1e36
        return loss, out


def test_an_overflow_of_fp16_is_a_counted_skip(folder: Path) -> None:
    """Whatever the first scale makes overflow is one too: skips and updates that changed nothing are the same."""
    watcher = Weights()
    args = trainer_for(folder, None, watcher, fp16=True).args
    torch.manual_seed(0)
    trainer = Trainer(Exploding(), args, train_dataset=samples(None), callbacks=[watcher])
    start = trainer.model.layer.weight.detach().flatten().tolist()
    trainer.train()
    assert trainer.state.global_step == 12
    unchanged = [before == after for before, after in pairwise([start, *watcher.after])]
    assert unchanged[7], "the update that overflowed changed the weights"
    assert not all(unchanged)
    counted = [logs.get("skipped_updates", 0) for logs in watcher.logs if "loss" in logs]
    assert counted == list(accumulate(map(int, unchanged)))


BOTH = {
    "data": "not finite in the data themselves: sample 13 of rank 0, sample 14 of rank 1:",
    "data, accumulated": "not finite in the data themselves: sample 13 of rank 0, sample 14 of rank 1:",
    "data, sharded": "not finite in the data themselves: sample 13 of rank 0, sample 14 of rank 1:",
    "data, skipped": "not finite in the data themselves: sample 13 of rank 0, sample 14 of rank 1",
    "loss": "not finite in the loss: samples 12, 13 of rank 0, samples 14, 15 of rank 1:",
    "loss, accumulated": "not finite in the loss: samples 12, 13 of rank 0, samples 14, 15 of rank 1:",
    "gradient": "data and losses are finite on every rank, the gradient is not:",
}


@pytest.mark.dist
def test_two_ranks_agree(folder: Path) -> None:
    ranks = on_ranks(2, main, folder)
    step = BAD // 4 + 1
    for said in ranks:
        assert said["after"] == ranks[0]["after"]
        assert said["after"][step - 1] == said["after"][step - 2]
        assert said["skipped"] == 1
        assert said["rolled"] == ranks[0]["rolled"]
        assert (said["rolled"][0], said["window"]) == (6, [2])
        assert said["sharded"] == [6, [pytest.approx(row, rel=1e-5) for row in said["rolled"][1]]]
        assert len(said["told"]) == 1
        assert f"not finite in the data themselves: sample {BAD}" in said["told"][0], "whichever rank had it"
        assert f"at step {step}" in said["error"]
        assert f"not finite in the data themselves: sample {BAD} of rank " in said["error"], "on every rank"
        for name, words in BOTH.items():
            assert words in said["both"][name], name
    saved = sorted(int(path.name.split("-")[1]) for path in (folder / "raise").glob("checkpoint-*"))
    # With several ranks an error may cost the save that is under way.
    assert saved in (list(range(1, step)), list(range(1, step - 1)))


# --- what each rank runs ----------------------------------------------------------------------------------------------


CASES_ON_BOTH: dict[str, dict[str, Any]] = {
    "data": {"fault": math.nan, "column": 1},
    "data, accumulated": {"fault": math.nan, "column": 1, "gradient_accumulation_steps": 2},
    "data, sharded": {"fault": math.inf, "column": 1, "fsdp": "full_shard"},
    "data, skipped": {"fault": math.nan, "column": 1, "nonfinite_policy": "skip"},
    "loss": {"fault": 1000.0, "column": 0},
    "loss, accumulated": {"fault": 1000.0, "column": 0, "gradient_accumulation_steps": 2},
    "gradient": {"fault": -1000.0, "column": 0},
}


def on_both_ranks(folder: Path, **case: Any) -> str:
    """What is reported of two faulty samples in one update, each on a rank of its own."""
    trainer = faulty_on_both_ranks(folder, **case, save_strategy="no")
    try:
        trainer.train()
    except NonFiniteError as error:
        return str(error)
    return next(row["reason"] for row in trainer.state.log_history if "skipped_update" in row)


def main(folder: Path) -> dict[str, Any]:
    watcher = Weights()
    trainer = trainer_for(folder / "skip", float("nan"), watcher, nonfinite_policy="skip")
    trainer.train()
    said = {"after": watcher.after, "skipped": trainer.state.log_history[-2].get("skipped_updates")}
    roller = trainer_for(
        folder / "roll", float("nan"), Weights(), nonfinite_policy="rollback", save_steps=2, max_steps=6
    )
    said["rolled"] = roller.train().global_step, roller.model.layer.weight.tolist()
    said["window"] = [row["rolled_back_to"] for row in roller.state.log_history if "rolled_back_to" in row]
    sharded = trainer_for(
        folder / "sharded",
        float("nan"),
        None,
        nonfinite_policy="rollback",
        save_steps=2,
        max_steps=6,
        fsdp="full_shard",
    )
    said["sharded"] = sharded.train().global_step, whole(sharded.model.layer.weight).tolist()
    said["told"] = [row["reason"] for row in sharded.state.log_history if "rolled_back_to" in row]
    raiser = trainer_for(folder / "raise", float("nan"), Weights())
    try:
        raiser.train()
    except NonFiniteError as error:
        said["error"] = str(error)
    said["both"] = {name: on_both_ranks(folder / name, **case) for name, case in CASES_ON_BOTH.items()}
    trainer.end()
    return said
