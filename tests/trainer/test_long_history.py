"""The history of a long run is complete after a resume and after a rollback, and its old rows are saved once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.background_cases import trainer_of
from tests.trainer.nonfinite_cases import Weights, trainer_for

from windlass import TrainerCallback
from windlass.checkpoint import history
from windlass.cli.main import main
from windlass.core.events import TrainerState


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SEGMENT_ROWS", 4)


class Killed(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 29:
            raise RuntimeError("killed")


def run(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Any:
    settings = {"max_steps": 40, "save_steps": 5, "logging_steps": 1, "save_total_limit": 2, **changes}
    return trainer_of(folder, *callbacks, **settings)


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "loss" in row]


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_run_has_the_whole_history(background: bool, folder: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        run(folder, Killed(), save_in_background=background).train()
    linked = folder / "checkpoint-25" / "log_history" / "000000000.jsonl"
    before = linked.stat()
    assert before.st_nlink == 2  # two checkpoints are kept
    resumed = run(folder, save_in_background=background)
    resumed.train(resume_from_checkpoint=True)
    clean = run(folder / "clean")
    clean.train()
    logged = resumed.state.log_history
    assert repeatable(logged) == repeatable(clean.state.log_history)
    assert [row["step"] for row in repeatable(logged)] == list(range(1, 41))
    last = folder / "checkpoint-40"
    assert (last / linked.relative_to(linked.parents[1])).stat().st_ino == before.st_ino
    assert len(list((last / "log_history").iterdir())) == 9
    assert repeatable(TrainerState.load_from_json(last).log_history) == repeatable(logged)
    assert main(["checkpoint", "verify", str(folder)]) == 0


def test_a_rollback_takes_the_rows_of_its_checkpoint(folder: Path) -> None:
    trainer = trainer_for(
        folder, math.nan, Weights(), nonfinite_policy="rollback", save_steps=4, max_steps=24, logging_steps=1
    )
    trainer.train()
    steps = [row["step"] for row in repeatable(trainer.state.log_history)]
    assert steps == list(range(1, 25))
    found = TrainerState.load_from_json(folder / "checkpoint-24").log_history
    assert found == trainer.state.log_history[: len(found)]
    assert [row["step"] for row in repeatable(found)] == steps
    assert (folder / "checkpoint-4" / "trainer_state.json").stat().st_size > 0


def test_a_checkpoint_of_before_is_read_and_its_history_divided(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SEGMENT_ROWS", 5000)
    run(folder, max_steps=20).train()
    assert len(json.loads((folder / "checkpoint-20" / "trainer_state.json").read_text())["log_history"]) == 20
    monkeypatch.setattr(history, "SEGMENT_ROWS", 4)
    resumed = run(folder, max_steps=25)
    resumed.train(resume_from_checkpoint=True)
    rows = TrainerState.load_from_json(folder / "checkpoint-25").log_history
    assert rows == resumed.state.log_history[: len(rows)]
    assert (folder / "checkpoint-25" / "log_history").is_dir()
