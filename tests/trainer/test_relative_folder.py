"""A relative output folder and a script that changes its working directory."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.search.searches import SPACE
from tests.search.searches import trainer_of as search_of
from tests.trainer.background_cases import trainer_of

from windlass import TrainerCallback, TrainingArguments
from windlass.callbacks.run_view import read_run
from windlass.cli.run_status import status_of_run
from windlass.core import started


class Moves(TrainerCallback):
    """Works in another directory from the second update on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.chdir(self._folder)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    return here, there


BEST = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
}


def test_a_run_writes_and_resumes_where_its_folder_was_named(places: tuple[Path, Path]) -> None:
    here, there = places
    trainer = trainer_of(Path("out"), Moves(there), max_steps=4, **BEST)
    trainer.train()
    assert trainer.args.output_dir == "out"
    assert os.getcwd() == str(there)
    trainer.save_model("out/last")
    trainer.save_model(trainer.args.output_dir)
    assert os.listdir(there) == []
    names = {"checkpoint-2", "checkpoint-4", "metrics.jsonl", "last", "model.safetensors"}
    assert names <= set(os.listdir(here / "out"))
    assert Path(trainer.state.best_model_checkpoint).parent == here / "out"
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    assert trainer.state.global_step == 4
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    assert (here / "out" / "checkpoint-6").is_dir()
    assert os.listdir(there) == []

    (here / "out").rename(there / "moved")
    moved = trainer_of(Path("moved"), max_steps=8, **BEST)
    moved.train(resume_from_checkpoint=True)
    assert Path(moved.state.best_model_checkpoint).parent == there / "moved"
    assert os.listdir(here) == []


def test_the_command_that_resumes_is_typed_where_the_script_was_started(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = places
    monkeypatch.setattr(started, "FOLDER", str(here))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    os.chdir(there)
    trainer_of(Path("out"), max_steps=2).train(resume_from_checkpoint="auto")
    resume = status_of_run(read_run(there / "out"))["resume"]
    assert resume["command"] == f"cd {here} && python train.py"
    assert "was moved" not in resume["needs"]
    (there / "out").rename(there / "moved")
    resume = status_of_run(read_run(there / "moved"))["resume"]
    assert f"the run was moved: its output_dir is {there / 'moved'} now" in resume["needs"]


def test_where_arguments_take_a_relative_path_to_start(places: tuple[Path, Path]) -> None:
    here, there = places
    args = TrainingArguments("out")
    os.chdir(there)
    for same in (args, copy.copy(args), copy.deepcopy(args)):
        assert same.output_path == str(here / "out")
    assert args.resolve_path("out/checkpoint-1") == str(here / "out" / "checkpoint-1")
    assert args.resolve_path("output") == str(there / "output")
    (here / "older").mkdir()
    assert args.resolve_path("older") == str(here / "older")
    assert args.resolve_path("s3://a/b") == "s3://a/b"
    assert args.resolve_path("/a/b") == "/a/b"
    args.output_dir = "out"  # named again
    assert args.output_path == str(there / "out")
    args.output_dir = "s3://bucket/run"
    assert args.output_path == "s3://bucket/run"
    args.output_dir = "~/run"
    assert args.output_path == os.path.expanduser("~/run")


def test_the_trials_of_a_search_are_beside_its_study(places: tuple[Path, Path]) -> None:
    here, there = places
    trainer = search_of(Path("out"))
    os.chdir(there)
    trainer.hyperparameter_search(SPACE, n_trials=2)
    assert {"search.json", "run-0", "run-1"} <= set(os.listdir(here / "out"))
    assert os.listdir(there) == []
