"""The record of a run: what was set, the sessions, and the counts over all of them."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.test_report import NOTHING, arguments, log_run
from tests.trainer.small import Net, rows
from tests.trainer.small import arguments as short_run

from windlass import Trainer
from windlass.callbacks.metrics_log import read_rows
from windlass.callbacks.page_file import PageRun, render_page
from windlass.callbacks.page_tables import TrainingTime
from windlass.callbacks.report import summarised, training_time
from windlass.callbacks.run_record import (
    RECORD,
    RunRecord,
    changed_arguments,
    environment,
    read_failures,
    read_record,
)  # fmt: skip
from windlass.callbacks.run_view import read_run
from windlass.config.arguments import TrainingArguments, note_sources
from windlass.core.errors import PeerError


def resume(folder: Path, step: int, trained: dict[str, float], max_steps: int = 10) -> RunRecord:
    record = RunRecord(folder, arguments(folder), writes=True)
    record.begin(step, max_steps, trained)
    return record


def counts(seconds: float, samples: float, from_step: int = 0) -> dict[str, float]:
    return {"from_step": from_step, "seconds": seconds, "samples": samples}


def test_a_resumed_run_has_the_time_of_all_sessions_and_says_what_was_repeated(tmp_path: Path) -> None:
    log_run(tmp_path, max_steps=10)  # killed after its row of step 5, with a checkpoint of step 3
    record = resume(tmp_path, 3, counts(6.0, 24.0))
    record.end("failed", 8, counts(16.0, 64.0))
    record = resume(tmp_path, 7, counts(14.0, 56.0))
    record.end("finished", 10, counts(20.0, 80.0))
    found = read_record(tmp_path)
    assert found is not None
    assert [session["from_step"] for session in found["sessions"]] == [0, 3, 7]
    assert [session["repeated"] for session in found["sessions"]] == [0, 2, 1]
    time = training_time(found, read_rows(tmp_path))
    assert time == TrainingTime(20.0, 80.0, updates=10, from_step=0, sessions=3, repeated=3)


def test_a_session_without_an_end_counts_up_to_its_last_row(tmp_path: Path) -> None:
    log_run(tmp_path, max_steps=10)
    rows = read_rows(tmp_path)
    rows[-1]["timing"]["elapsed"] = 2.5
    assert training_time(read_record(tmp_path), rows) == TrainingTime(2.5, None, 5, 0, 1, 0)
    resume(tmp_path, 5, counts(4.0, 40.0))  # the row of step 5 is of the session before
    assert training_time(read_record(tmp_path), rows) == TrainingTime(4.0, None, 5, 0, 2, 0)


def test_a_run_whose_beginning_is_not_recorded_counts_from_its_checkpoint(tmp_path: Path) -> None:
    record = resume(tmp_path, 6, counts(0.0, 0.0, from_step=6))
    record.end("finished", 10, counts(8.0, 32.0, from_step=6))
    assert training_time(read_record(tmp_path), []) == TrainingTime(8.0, 32.0, 4, 6, 1, 0)


def test_a_complete_run_that_is_resumed_keeps_its_record(tmp_path: Path) -> None:
    log_run(tmp_path).end("finished", 5, counts(2.0, 40.0))
    before = (tmp_path / RECORD).read_bytes()
    resume(tmp_path, 5, counts(2.0, 40.0), max_steps=5).end("finished", 5, counts(2.1, 40.0))
    assert (tmp_path / RECORD).read_bytes() == before


def test_a_fresh_run_replaces_the_record_of_another(tmp_path: Path) -> None:
    log_run(tmp_path).end("finished", 5, counts(2.0, 40.0))
    log_run(tmp_path)
    found = read_record(tmp_path)
    assert found is not None
    assert (len(found["sessions"]), found["end"]) == (1, None)


@pytest.mark.parametrize("name", [RECORD, "metrics.jsonl"])
def test_damaged_files_do_not_stop_a_run_that_is_resumed(tmp_path: Path, name: str, log_lines: Any) -> None:
    log_run(tmp_path)
    (tmp_path / name).write_text("{broken\n")
    resume(tmp_path, 3, counts(6.0, 24.0))
    assert "earlier sessions of the run are not counted" in log_lines.text
    assert len(json.loads((tmp_path / RECORD).read_text())["sessions"]) == 1


def test_changed_arguments_are_those_that_were_set_without_secrets(tmp_path: Path) -> None:
    args = TrainingArguments(
        "out", eval_strategy="steps", eval_steps=3, hub_token="hidden", gradient_checkpointing=False,
        report_to=[], weight_decay=0.0, use_cpu=True,
    )  # fmt: skip
    args.include_num_input_tokens_seen = "all"
    assert changed_arguments(args) == {
        "output_dir": "out",
        "eval_strategy": "steps",
        "eval_steps": 3,
        "include_num_input_tokens_seen": "all",
        "use_cpu": True,
    }
    assert changed_arguments(TrainingArguments()) == {}


def test_an_infinite_argument_is_json_and_has_a_page(tmp_path: Path) -> None:
    """Gradients that are measured and not clipped: a common `max_grad_norm`."""
    args = short_run(tmp_path, max_grad_norm=math.inf, max_steps=2, logging_strategy="steps", logging_steps=1)
    Trainer(Net(), args, train_dataset=rows(8)).train()
    record = json.loads((tmp_path / RECORD).read_text(), parse_constant=pytest.fail)
    assert record["arguments"]["max_grad_norm"] == "Infinity"
    assert '"grad_norm"' in render_page([summarised(read_run(tmp_path))])


def test_each_setting_has_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = TrainingArguments(str(tmp_path), seed=3, weight_decay=0.5, use_cpu=True)
    beside = {"data.train": ("my.txt", "a.yaml:7"), "data.password": ("secret", "a.yaml:8")}
    note_sources(args, {"seed": "a.yaml:2"}, beside)
    RunRecord(tmp_path, args, writes=True).begin(0, 4, NOTHING)
    view = read_run(tmp_path)
    assert {one.name: (one.value, one.source) for one in view.configuration} == {
        "output_dir": (str(tmp_path), "the script"),
        "seed": (3, "a.yaml:2"),
        "weight_decay": (0.5, "the script"),
        "use_cpu": (True, "the script"),
        "data.train": ("my.txt", "a.yaml:7"),
        "precision": ("bf16", "ACCELERATE_MIXED_PRECISION"),
    }
    page = render_page([PageRun(view, "", None)])
    assert '<th scope="row">seed</th><td class="num">3</td><td class="muted">a.yaml:2</td>' in page
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({**record, "sources": None, "settings": [1]}))
    assert {one.source for one in read_run(tmp_path).configuration} == {""}, "of an earlier version"


def test_the_command_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train.py", "--hub_token", "abc", "--api_key=def", "hub_token=ghi", "--seed", "3", "tokens=4"]
    monkeypatch.setattr(sys, "argv", command)
    assert (
        environment()["command"] == "train.py --hub_token *** --api_key=*** hub_token=*** --seed 3 tokens=4"
    )


def test_the_environment_is_told_without_starting_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_uname_cache", None)  # another test may have asked
    monkeypatch.setattr(platform, "_platform_cache", {})
    monkeypatch.setattr(subprocess, "Popen", None)
    assert environment()["system"] == f"{platform.system()}-{platform.release()}"


def test_a_record_is_of_the_run_that_it_is_beside(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert read_rows(tmp_path) == []
    assert training_time(None, []) is None
    RunRecord(tmp_path, arguments(tmp_path), writes=True).end("failed", 0, NOTHING)  # never began
    assert not list(tmp_path.iterdir())


def test_what_failed_first_is_told_by_what_it_was_and_not_by_clocks_of_machines(tmp_path: Path) -> None:
    def left(rank: int, **values: Any) -> None:
        failure = {
            "rank": rank,
            "status": "failed",
            "step": 7,
            "time": 50.0,
            "reason": f"rank {rank}",
            **values,
        }
        (tmp_path / f".windlass-failure-{rank}.json").write_text(json.dumps(failure))

    left(0, time=1.0, of_others=True)
    left(1, time=2.0, step=8)
    left(2, time=9.0)
    left(3, time=8.0)
    assert [one["rank"] for one in read_failures(tmp_path)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("error", "of_others"),
    [
        (ValueError("mine"), False),
        (PeerError("elsewhere"), True),
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
    ],
)
def test_a_failure_says_whether_another_rank_was_the_reason(
    tmp_path: Path, error: Exception, of_others: bool
) -> None:
    record = RunRecord(tmp_path, arguments(tmp_path), writes=False)
    record.begin(0, 10, NOTHING)
    record.end("failed", 3, NOTHING, error)
    (found,) = read_failures(tmp_path)
    assert found["of_others"] == of_others
