"""Rolling back: the run goes on as one that never saw the window of data that led to non-finite values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.nonfinite_cases import BAD, Weights, samples, trainer_for

from windlass import NonFiniteError, Trainer, TrainerCallback
from windlass.callbacks.metrics_log import read_metrics

BAD_STEP, SAVED = BAD // 2 + 1, 4


def rolling(
    folder: Path, data: list[dict[str, Any]] | None = None, **changes: Any
) -> tuple[Trainer, Weights]:
    watcher = Weights()
    changes = {"nonfinite_policy": "rollback", "save_steps": SAVED, "max_steps": 12, **changes}
    trainer = trainer_for(folder, math.nan, watcher, **changes)
    if data is not None:
        trainer.train_dataset = data
    return trainer, watcher


def without_window() -> list[dict[str, Any]]:
    """The samples in the order in which a run sees them that goes back from step 7 to step 4, and on behind them."""
    whole = samples(None)
    return whole[: 2 * SAVED] + whole[2 * BAD_STEP :] + whole[:6]


def test_it_goes_on_as_if_the_window_had_not_been(folder: Path) -> None:
    trainer, _ = rolling(folder / "bad")
    result = trainer.train()
    clean, watcher = rolling(folder / "clean", without_window())
    clean.train()
    assert result.global_step == 12
    assert [p.tolist() for p in trainer.model.parameters()] == [p.tolist() for p in clean.model.parameters()]
    assert len(watcher.after) == 12
    assert math.isfinite(result.training_loss)


def test_it_is_logged_and_what_was_undone_is_not(folder: Path) -> None:
    trainer, _ = rolling(folder)
    trainer.train()
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    noted = [row for row in read_metrics(folder / "metrics.jsonl") if "rolled_back_to" in row]
    assert [(row["rolled_back_from"], row["rolled_back_to"]) for row in noted] == [(BAD_STEP, SAVED)]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == list(range(1, 13))


class Dies(TrainerCallback):
    """Ends the run at the first end of a step that comes after going back."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any("rolled_back_to" in row for row in state.log_history) and state.global_step == 2 * SAVED + 1:
            raise RuntimeError("killed")


def test_killed_after_it_the_run_resumes_to_the_same_bits(folder: Path) -> None:
    whole, _ = rolling(folder / "whole")
    whole.train()
    killed, _ = rolling(folder / "killed")
    killed.add_callback(Dies)
    with pytest.raises(RuntimeError, match="killed"):
        killed.train()
    resumed, _ = rolling(folder / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)

    def repeatable(name: str) -> list[str]:
        rows = [dict(row) for row in read_metrics(folder / name / "metrics.jsonl")]
        return [json.dumps({k: v for k, v in row.items() if k != "timing"}) for row in rows]

    assert repeatable("killed") == repeatable("whole")


def test_without_a_checkpoint_it_stops(folder: Path) -> None:
    trainer, _ = rolling(folder, save_steps=10)
    with pytest.raises(NonFiniteError, match=f"step {BAD_STEP} .*no checkpoint yet"):
        trainer.train()


def test_it_gives_up_where_going_back_does_not_help(folder: Path) -> None:
    data = samples(None)
    for sample in data[2 * SAVED :]:
        sample["x"][0] = math.nan
    trainer, _ = rolling(folder, data)
    with pytest.raises(NonFiniteError, match="going back to checkpoint-4 3 times"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
