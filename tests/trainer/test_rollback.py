"""Rolling back: the run goes on as one that never saw the window of data that led to non-finite values."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.nonfinite_cases import BAD, Fragile, Weights, samples, trainer_for
from torch import Tensor

from windlass import NonFiniteError, Trainer, TrainerCallback
from windlass.callbacks.metrics_log import read_metrics
from windlass.callbacks.report import ReportCallback

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
    assert [(row["updates_undone"], row["samples_left_out"]) for row in noted] == [(2, 6)]
    assert f"sample {BAD}" in noted[0]["reason"]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == list(range(1, 13))


class Dies(TrainerCallback):
    """Ends the run at the end of a step that comes after going back."""

    step = 2 * SAVED + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any("rolled_back_to" in row for row in state.log_history) and state.global_step == self.step:
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


def test_killed_before_the_next_save_it_comes_to_the_same_place_again(folder: Path) -> None:
    whole, _ = rolling(folder / "whole")
    whole.train()
    killed, _ = rolling(folder / "killed")
    killed.add_callback(type("Dies", (Dies,), {"step": SAVED + 1}))
    with pytest.raises(RuntimeError, match="killed"):
        killed.train()
    resumed, watcher = rolling(folder / "killed")
    resumed.train(resume_from_checkpoint=True)
    back = [row["rolled_back_to"] for row in watcher.logs if "rolled_back_to" in row]
    assert back == [SAVED], "the window is met again, and left out again"
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_several_windows(folder: Path) -> None:
    """In both epochs: the second window lies behind another save, and its sample comes again in a third epoch."""
    data = samples(None)
    data[BAD]["x"][0] = data[3]["x"][0] = math.nan
    trainer, _ = rolling(folder, data, save_steps=1, max_steps=24)
    result = trainer.train()
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "rolled_back_to" in row]
    assert [row["reason"].rsplit(" ", 1)[1] for row in rows] == ["3", f"{BAD}"] * 2 + ["3"]
    assert all(row["updates_undone"] == 0 and row["samples_left_out"] == 2 for row in rows)
    assert result.global_step == 24
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_the_newest_checkpoint_may_have_been_removed(folder: Path) -> None:
    class Removes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == SAVED + 2:
                shutil.rmtree(folder / f"checkpoint-{SAVED + 2}")

    trainer, watcher = rolling(folder, save_steps=2)
    trainer.add_callback(Removes)
    trainer.train()
    assert [row["rolled_back_to"] for row in watcher.logs if "rolled_back_to" in row] == [SAVED]


def test_the_report_names_the_window_and_the_sample(folder: Path) -> None:
    for policy in ("rollback", "skip"):
        trainer, _ = rolling(folder / policy, nonfinite_policy=policy)
        trainer.add_callback(ReportCallback(folder / policy))
        trainer.train()
        page = (folder / policy / "report.html").read_text()
        assert f"not finite in the data themselves: sample {BAD}" in page
    assert f"update {BAD_STEP} skipped" in page
    assert "2 updates undone and 6 samples left out" in (folder / "rollback" / "report.html").read_text()


class Exploding(Fragile):
    """The gradients of one update do not fit fp16 at any scale that those before it left."""

    calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, out = super().forward(x, labels)
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            loss = loss * 1e36 if self.calls == SAVED + 1 else loss
        return loss, out


def test_an_overflow_of_fp16_is_an_ordinary_skip_and_a_bad_sample_is_not(folder: Path) -> None:
    trainer, watcher = rolling(folder, fp16=True)
    torch.manual_seed(0)
    mixed = Trainer(Exploding(), trainer.args, train_dataset=samples(math.nan), callbacks=[watcher])
    mixed.train()
    assert [row["rolled_back_from"] for row in watcher.logs if "rolled_back_to" in row] == [BAD_STEP]
    assert max(row.get("skipped_updates", 0) for row in watcher.logs) > 0, "the overflow"
    assert all(torch.isfinite(p).all() for p in mixed.model.parameters())


def test_without_a_checkpoint_it_stops(folder: Path) -> None:
    trainer, _ = rolling(folder, save_steps=10)
    with pytest.raises(NonFiniteError, match=f"step {BAD_STEP} .*no checkpoint yet"):
        trainer.train()


def test_it_gives_up_where_going_back_does_not_help(folder: Path) -> None:
    data = samples(None)
    for sample in data[2 * SAVED :]:
        sample["x"][0] = math.nan
    trainer, _ = rolling(folder, data)
    with pytest.raises(NonFiniteError, match="rolling back to checkpoint-4 3 times"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
