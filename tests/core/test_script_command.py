"""The command of a script, and how its user resumes the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.core import script_command
from windlass.core.locations import shown_path
from windlass.core.script_command import needs_to_resume, resume_hint, with_flag
from windlass.core.world import LAUNCH_VARIABLE


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`windlass launch --num_processes 2 first.py --lr 1e-3`"""
    monkeypatch.setattr(script_command, "_flags", set())
    monkeypatch.setattr(sys, "argv", ["first.py", "--lr", "1e-3"])
    monkeypatch.setenv(
        LAUNCH_VARIABLE, json.dumps(["windlass", "launch", "--num_processes", "2", "first.py"])
    )
    monkeypatch.chdir(tmp_path)


def hint(asked: Any) -> str:
    return resume_hint(3, 8000, Path("run/checkpoint-3").absolute(), asked)


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_script_that_resumes_is_started_again(asked: Any) -> None:
    assert hint(asked) == (
        "stopped at step 3 of 8,000; run/checkpoint-3 is complete. The same command resumes:\n"
        "  windlass launch --num_processes 2 first.py --lr 1e-3"
    )


@pytest.mark.parametrize("asked", [None, False, "run/checkpoint-1"])
def test_others_need_a_line(asked: Any) -> None:
    assert hint(asked) == (
        "stopped at step 3 of 8,000; run/checkpoint-3 is complete. To resume, write "
        'trainer.train(resume_from_checkpoint="auto") in the script, and start it again:\n'
        "  windlass launch --num_processes 2 first.py --lr 1e-3"
    )


def test_or_the_flag_that_their_parser_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from windlass import HfArgumentParser  # of `compat/`: the other tests run without it

    words = ["first.py", "--output_dir", str(tmp_path), "--resume_from_checkpoint", "run/checkpoint-1"]
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words[1:])
    assert needs_to_resume(None) == "script", "these words were not the command line's"
    monkeypatch.setattr(sys, "argv", words)
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    assert hint("run/checkpoint-1").splitlines()[1:] == [
        f"  windlass launch --num_processes 2 first.py --output_dir {tmp_path} --resume_from_checkpoint auto"
    ]


def test_the_flag_replaces_what_a_command_has_of_it() -> None:
    for words in (
        ["--resume_from_checkpoint"],
        ["--resume-from-checkpoint", "a b"],
        ["--resume_from_checkpoint=x"],
    ):
        assert with_flag(["one.py", *words, "--lr", "1"]) == [
            "one.py",
            "--lr",
            "1",
            "--resume_from_checkpoint",
            "auto",
        ]


def test_without_a_script_or_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_hint(1, 2, None, None).startswith(
        "stopped at step 1 of 2; nothing was saved. Start again with:\n"
    )
    monkeypatch.delenv(LAUNCH_VARIABLE)
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))  # as in a notebook
    assert resume_hint(1, 2, None, None) == "stopped at step 1 of 2; nothing was saved"
    assert hint(None).endswith("is complete. train(resume_from_checkpoint=True) continues from it")


def test_paths_are_shown_alike(tmp_path: Path) -> None:
    assert shown_path(tmp_path / "runs" / "a") == shown_path("runs/a") == "runs/a"
    assert shown_path("/elsewhere/a") == "/elsewhere/a"


def test_a_path_is_shown_although_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shown_path(tmp_path / "a") == str(tmp_path / "a")
