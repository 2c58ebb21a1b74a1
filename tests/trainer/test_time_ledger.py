"""The time of a run over all its attempts: every second has one kind, and what was planted is found in its kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.browser import address_of, browser, needs_browser
from tests.dist.launch import ROOT, launch
from tests.trainer.planted_run import FORWARD, ROW, SAVE, STEPS, STRAGGLER
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.callbacks.clock_file import CLOCK
from windlass.callbacks.page_data import page_data
from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.rows import repeatable
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


def test_a_script_may_set_the_precision_of_products_by_either_name(tmp_path: Path) -> None:
    """torch has two, and refuses to read the older one after the newer was set."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        Trainer(Net(), arguments(tmp_path, max_steps=1), train_dataset=rows(16)).train()
    finally:
        products.fp32_precision = before


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


# --- planted seconds, on a clock that nothing else moves --------------------------------------------------------------

KILLS = (5, 7, 8, 10, 11)


def planted_by(folder: Path, rank: int = 0) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"planted-{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was really killed five times, and then ended."""
    folder = tmp_path_factory.mktemp("killed")
    for step in (*KILLS, 0):
        launch(1, "tests.trainer.planted_run", folder, step, False, expect=1 if step else 0)
    return folder


@pytest.mark.dist
def test_planted_seconds_are_found_in_their_kinds_over_five_kills(killed: Path) -> None:
    view, planted = read_run(killed), planted_by(killed)
    assert [attempt.status for attempt in view.attempts] == ["killed"] * 5 + ["finished"]
    assert [attempt.from_step for attempt in view.attempts] == [0, 4, 4, 4, 8, 8]
    assert [attempt.step for attempt in view.attempts] == [*KILLS, STEPS]
    assert [attempt.repeated for attempt in view.attempts] == [0, 1, 3, 4, 2, 3]
    for number, (attempt, seconds) in enumerate(zip(view.attempts, planted, strict=True)):
        found = attempt.seconds
        assert found.get("save", 0.0) == pytest.approx(seconds.get("save", 0.0))
        of_updates = sum(found.get(kind, 0.0) for kind in UPDATE_KINDS)
        assert of_updates == pytest.approx(seconds["data"] + seconds["compute"]), number
        new = attempt.step - attempt.from_step - attempt.repeated
        assert found.get("compute", 0.0) == pytest.approx(new * FORWARD)
        # The rows of an update are read while the one before is done.
        assert found.get("data", 0.0) == pytest.approx(4 * ROW * new, abs=4.001 * ROW)
    first = view.attempts[0].seconds
    assert first["data"] / (first["data"] + first["compute"]) == pytest.approx(0.3, abs=0.05)
    assert view.ledger is not None
    assert view.ledger.seconds["save"] == pytest.approx(3 * SAVE)
    assert sum(view.ledger.seconds.values()) == pytest.approx(view.ledger.wall)


@pytest.mark.dist
def test_a_run_that_was_killed_five_times_has_one_curve(killed: Path, tmp_path: Path) -> None:
    view = read_run(killed)
    launch(1, "tests.trainer.planted_run", tmp_path, 0, False)
    assert [repeatable(row) for row in view.rows] == [repeatable(row) for row in read_run(tmp_path).rows]
    data = page_data(view)
    assert data["series"]["loss"]["s"] == list(range(1, STEPS + 1))
    assert data["series"]["loss"]["t"] == sorted(data["series"]["loss"]["t"])
    assert [mark["step"] for mark in data["marks"] if mark["kind"] == "restart"] == [4, 4, 4, 8, 8]
    assert "<h2>Attempts</h2>" in render_page([summarised(view)])


@needs_browser
@pytest.mark.dist
def test_the_page_of_a_run_that_was_killed_five_times(killed: Path, tmp_path: Path) -> None:
    view = read_run(killed)
    (tmp_path / "page.html").write_text(render_page([summarised(view)]))
    with browser() as tab:
        tab.open(address_of(tmp_path / "page.html"))
        assert tab.value("document.querySelectorAll('.attempt').length") == 6
        assert tab.value("document.querySelectorAll('.attempt.is-killed').length") == 5
        steps, losses = tab.value("windlass.charts()[0].chart.data")
        assert steps == list(range(1, STEPS + 1))
        assert losses == [row["loss"] for row in view.rows]
        assert tab.errors == []


@pytest.mark.dist
def test_the_rank_that_straggles_is_named_and_by_how_much(tmp_path: Path) -> None:
    launch(2, "tests.trainer.planted_run", tmp_path, 0, True)
    view = read_run(tmp_path)
    assert [row["timing"]["slowest_rank"] for row in view.rows] == [1] * STEPS
    # On its own clock rank 0 waits for nothing: an update of it is the rows and the forward.
    waits = [row["timing"]["slowest_rank_wait"] for row in view.rows[1:-1]]
    assert waits == pytest.approx([STRAGGLER / (4 * ROW + FORWARD)] * (STEPS - 2), abs=1e-3)
    (attempt,) = view.attempts
    assert attempt.seconds["data"] == pytest.approx(STEPS * 4 * ROW)
    assert attempt.seconds["compute"] == pytest.approx(STEPS * FORWARD)
    assert attempt.seconds["save"] == pytest.approx(3 * SAVE)
    assert planted_by(tmp_path, 1)[0]["compute"] == pytest.approx(STEPS * (FORWARD + STRAGGLER))


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
