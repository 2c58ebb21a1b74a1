"""`answers.jsonl`: what a resumed run finds, and what damage does to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.callbacks.answers_log import AnswersLog
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.locations import local_folder


def row(step: int, number: int = 0) -> dict[str, Any]:
    return {"step": step, "set": "eval", "number": number, "prompt": "p", "answer": "a\u2028\nb", "tokens": 2}


def begun(folder: Path, step: int) -> AnswersLog:
    log = AnswersLog(folder)
    log.on_train_begin(TrainingArguments(str(folder)), TrainerState(global_step=step), TrainerControl())
    return log


def written(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "answers.jsonl").read_bytes().decode().split("\n")
    assert lines.pop() == ""
    return [(found["step"], found["number"]) for found in map(json.loads, lines)]


def test_a_resumed_run_cuts_back_and_repeats_nothing(tmp_path: Path) -> None:
    log = begun(tmp_path, 0)
    for step in (1, 2, 3):
        log.write([row(step), row(step, 1)])
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "torn')
    again = begun(tmp_path, 2)
    again.write([row(2), row(2, 1)])  # the evaluation of the checkpoint, made again
    again.write([row(3)])
    assert written(tmp_path) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    again.roll_back(TrainerState(global_step=1))
    assert written(tmp_path) == [(1, 0), (1, 1)]


def test_a_new_run_sets_the_rows_of_an_earlier_one_aside(tmp_path: Path) -> None:
    begun(tmp_path, 0).write([row(1)])
    begun(tmp_path, 0).write([row(2)])
    assert written(tmp_path) == [(2, 0)]
    assert (tmp_path / "answers-1.jsonl").exists()


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "answers.jsonl").write_text("[1]\n")
    begun(tmp_path, 3).write([row(4)])
    assert written(tmp_path) == [(4, 0)]


def test_each_run_has_its_answers_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "staging"))
    log = begun(tmp_path / "search", 0)
    places = [f"{tmp_path}/search/run-0", f"file://{tmp_path}/bucket/run"]
    for step, place in enumerate(places, start=1):
        log.on_train_begin(TrainingArguments(place), TrainerState(), TrainerControl())
        log.write([row(step)])
        assert written(local_folder(place)) == [(step, 0)]
    assert not (tmp_path / "search" / "answers.jsonl").exists()
