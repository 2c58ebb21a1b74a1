"""Where a run continues from is known before anything is prepared, and the command that continues it is complete."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_train import LM

from windlass.checkpoint.store import Store
from windlass.cli.command_line import program
from windlass.cli.main import main
from windlass.cli.resume_point import find_resume_point
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import CheckpointError, ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (2, 4):
        Store(tmp_path).write(step, {}, lambda draft: draft.write_file("tokenizer.json", b"{}"))
    return tmp_path


@pytest.mark.parametrize(
    ("resume", "step"),
    [(True, 4), ("auto", 4), ("checkpoint-2", 2), ("~/checkpoint-2", 2), (None, None), (False, None),
     ("file:///elsewhere/checkpoint-2", None)],
)  # fmt: skip
def test_the_checkpoint_is_known_with_its_step(
    resume: bool | str | None, step: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    asked = str(folder / "checkpoint-2") if resume == "checkpoint-2" else resume
    point = find_resume_point(asked, TrainingArguments(str(folder)))
    assert (None if point is None else (point.path, point.step)) == (
        None if step is None else (folder / f"checkpoint-{step}", step)
    )


@pytest.mark.parametrize("word", [".", "inner/.."])
def test_the_working_directory_may_be_the_checkpoint(
    word: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "checkpoint-2")
    Path("inner").mkdir()
    point = find_resume_point(word, TrainingArguments(folder))
    assert point is not None
    assert (point.path, point.step) == (folder / "checkpoint-2", 2)


def test_a_damaged_one_is_passed_over(folder: Path) -> None:
    (folder / "checkpoint-4" / "tokenizer.json").write_bytes(b"[]")
    point = find_resume_point(True, TrainingArguments(str(folder)))
    assert point is not None
    assert point.step == 2
    with pytest.raises(CheckpointError, match="tokenizer"):
        find_resume_point(str(folder / "checkpoint-4"), TrainingArguments(str(folder)))


def test_no_checkpoint_is_an_error_unless_it_may_start(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path / "new"))
    assert find_resume_point("auto", args) is None
    with pytest.raises(CheckpointError, match='to start a new run if there is none, resume from "auto"'):
        find_resume_point(True, args)


def test_a_checkpoint_of_a_later_step_is_refused(folder: Path) -> None:
    assert find_resume_point(True, TrainingArguments(str(folder), max_steps=4)) is not None
    with pytest.raises(
        ConfigError, match=r"training.max_steps=3: ends at step 3, and the checkpoint is of step 4"
    ):
        find_resume_point(True, TrainingArguments(str(folder), max_steps=3))


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not\n" * 60)
    (tmp_path / "lm.yaml").write_text(LM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume"], "No valid checkpoint found in output directory (runs/lm)"),
        (["--resume", "runs/lm/checkpoint-3"], "runs/lm/checkpoint-3"),
        (["--output-dir", "text.txt/run"], "it can't be written"),
        (["--output-dir", "long" * 100], "it can't be written (File name too long)"),
        (["--resume="], "--resume has an empty value"),
        (["--output-dir", ""], "--output-dir has an empty value"),
    ],
)
def test_it_is_checked_before_data_and_model_are_prepared(
    words: list[str], said: str, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # of the parser
        assert main(["train", "lm.yaml", *words]) == 2
    written = capsys.readouterr()
    assert said in written.err
    assert written.out == ""


def test_a_run_says_where_it_continues_and_never_behind_its_end(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lm.yaml"]) == 0
    first = capsys.readouterr().out
    files = dict(
        line.split(maxsplit=1) for line in first.splitlines() if "runs/lm/" in line and "[" not in line
    )
    assert files == {
        "model": "runs/lm/checkpoint-6",
        "log": "runs/lm/metrics.jsonl",
        "report": "runs/lm/report.html",
        **({"picture": "runs/lm/training.png"} if "training.png" in first else {}),
    }
    assert main(["train", "lm.yaml", "--resume", "training.max_steps=7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Continuing from runs/lm/checkpoint-6, step 6\nModel ")
    words = ["training.max_steps=-1", "training.num_train_epochs=0.2"]
    assert main(["train", "lm.yaml", "--resume", *words]) == 2
    written = capsys.readouterr()
    assert "training.num_train_epochs=0.2: ends at step 2, and the checkpoint is of step 7" in written.err
    assert "%" not in written.out
    assert main(["train", "lm.yaml", "training.save_strategy=no", "--output-dir", "kept"]) == 0
    assert "\nresume" not in capsys.readouterr().out


def test_the_program_is_named_so_that_a_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "my env" / "windlass"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nfrom windlass.cli.command_line import program\nprint(program())\n"
    )
    command.chmod(0o755)

    def named(*words: str | Path, path: Path) -> list[str]:
        done = subprocess.run(
            list(map(str, words)), env={"PATH": str(path), "PYTHONPATH": ":".join(sys.path)}, cwd=tmp_path,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return shlex.split(done.stdout.strip("[]\n").replace(",", " "))

    assert named(command, path=command.parent) == ["windlass"]
    assert named(command, path=tmp_path) == [str(command)]
    assert named("./my env/windlass", path=tmp_path) == ["my env/windlass"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/windlass/__main__.py"])
    assert program() == [sys.executable, "-m", "windlass"]
