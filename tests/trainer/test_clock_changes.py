"""The clock on the wall is set back a day while a run goes on, and again before it is resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.core.run_clock import Moment, seconds_since


class SetsItBack(TrainerCallback):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.saved: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.time()
        self.patch.setattr(time, "time", lambda: now - 86400.0)


def _train(
    folder: Path, patch: pytest.MonkeyPatch, steps: int, resume: bool = False
) -> tuple[dict[str, float], list[int]]:
    args = arguments(
        folder, max_steps=steps, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=100, save_every=1e-9, include_num_input_tokens_seen="all",
    )  # fmt: skip
    data = rows(32)
    clock = SetsItBack(patch)
    trainer = Trainer(Net(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[clock])
    return trainer.train(resume_from_checkpoint=resume).metrics, clock.saved


def test_durations_stay_true_and_timed_saves_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, resume in ((4, False), (8, True)):
        metrics, saved = _train(tmp_path, monkeypatch, steps, resume)
        assert 0 < metrics["train_runtime"] < 3600
        assert metrics["train_samples_per_second"] > 0
        assert len(saved) >= 2, "the time to save came again after the clock was set back"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    durations = [v for line in lines for k, v in line["timing"].items() if k.endswith("_runtime")]
    assert len(durations) >= 6
    assert all(0 <= seconds < 3600 for seconds in durations)


def test_a_moment_is_a_time_and_measures_by_the_other_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    began = Moment()
    assert abs(began - time.time()) < 3600
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= began.elapsed() < 3600
    assert seconds_since(began) >= 0
    assert seconds_since(5.0) == 0.0
