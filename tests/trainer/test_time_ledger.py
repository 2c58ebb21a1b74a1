"""The time of a run over all its attempts: every second has one kind, and what was planted is found in its kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.callbacks.clock_file import CLOCK
from windlass.callbacks.run_view import read_run

UPDATE_KINDS = ("data", "compute", "update", "exchange", "repeated")


def test_a_run_records_its_time_and_its_rows_add_up(tmp_path: Path) -> None:
    options = {"max_steps": 6, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    Trainer(Net(), arguments(tmp_path, **options), train_dataset=rows(64)).train()
    view = read_run(tmp_path)
    (attempt,) = view.attempts
    assert view.ledger is not None
    assert attempt.status == "finished"
    assert attempt.ended == pytest.approx(attempt.began + sum(attempt.seconds.values()))
    assert view.ledger.wall == pytest.approx(sum(view.ledger.seconds.values()))
    assert {"start_up", "data", "compute", "update", "save", "callbacks"} <= attempt.seconds.keys()
    assert "repeated" not in attempt.seconds
    assert not (tmp_path / CLOCK).exists()
    # What rows have is a part of it, and each second is in one row.
    for kind in ("data", "update"):
        of_rows = sum(row["timing"].get(f"{kind}_seconds", 0.0) for row in view.rows)
        assert 0 < of_rows <= attempt.seconds[kind] + 1e-3
    assert all(row["timing"]["samples_per_second"] > 0 for row in view.rows)
    assert "mfu" not in view.rows[0]["timing"], "the peak of a CPU is not known"


def test_the_gap_between_two_attempts_is_stopped(tmp_path: Path) -> None:
    for steps in (3, 6):
        options = {
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 3,
            "learning_rate": steps / 100,
        }
        trainer = Trainer(Net(), arguments(tmp_path, **options), train_dataset=rows(64))
        trainer.train(resume_from_checkpoint="auto")
    view = read_run(tmp_path)
    first, second = view.attempts
    assert view.ledger is not None
    assert first.ended is not None
    assert second.ended is not None
    assert (second.from_step, second.step, second.repeated) == (3, 6, 0)
    gap = second.began - first.ended
    assert view.ledger.seconds["stopped"] == pytest.approx(gap, abs=1e-3)
    assert view.ledger.wall == pytest.approx(second.ended - first.began, rel=0.005)
    assert second.changed["max_steps"] == [3, 6]
    assert [event.kind for event in view.events] == ["arguments_changed"]


@pytest.mark.slow
def test_planted_waits_are_found_over_three_kills(tmp_path: Path) -> None:
    """The run says how long it really slept, so the load of the machine does not matter."""
    for kill_at in (6, 9, 11, 0):
        command = [sys.executable, "-m", "tests.trainer.timed_run", str(tmp_path), str(kill_at)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == (-9 if kill_at else 0), ended.stderr[-2000:]
    view = read_run(tmp_path)
    slept = [json.loads(line) for line in (tmp_path / "slept.jsonl").read_text().splitlines()]
    assert [attempt.status for attempt in view.attempts] == ["killed", "killed", "killed", "finished"]
    assert [attempt.repeated for attempt in view.attempts] == [0, 2, 1, 3]
    assert view.ledger is not None
    for attempt, planted in zip(view.attempts, slept, strict=True):
        wall = sum(attempt.seconds.values())
        of_updates = sum(attempt.seconds.get(kind, 0.0) for kind in UPDATE_KINDS)
        # Of a killed attempt up to the last second is not known.
        unknown = planted.get("callbacks", 0.0) and 1.2
        assert of_updates / wall == pytest.approx((planted["data"] + planted["compute"]) / wall, abs=0.02)
        assert attempt.seconds.get("save", 0.0) / wall == pytest.approx(
            planted.get("save", 0) / wall, abs=0.05
        )
        assert attempt.seconds["callbacks"] >= planted.get("callbacks", 0.0) - unknown
    assert view.ledger.wall == pytest.approx(view.attempts[-1].ended - view.attempts[0].began, rel=0.005)
