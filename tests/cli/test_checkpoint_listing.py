"""`windlass checkpoint ls`, `verify` and `prune` of folders with several runs, and of those that another program
writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store
from windlass.cli.main import main


@pytest.mark.parametrize(("command", "code"), [("ls", 0), ("verify", 1)])
def test_what_transformers_wrote_is_called_that(
    command: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-9"
    folder.mkdir()
    for name in ("trainer_state.json", "optimizer.pt"):
        (folder / name).write_bytes(b"{}")
    assert main(["checkpoint", command, str(tmp_path)]) == code
    assert "transformers' Trainer wrote it, without hashes to verify it by" in capsys.readouterr().out


@pytest.mark.parametrize("word", [".", "runs", "ABSOLUTE"])
def test_the_runs_below_a_folder_are_listed(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, steps in (
        ("runs/a", (2, 10)),
        ("runs/b/c", (1,)),
        ("runs/.hidden", (5,)),
        ("runs/a/checkpoint-2/inner", (7,)),
    ):
        for step in steps:
            Store(tmp_path / name).write(step, {}, lambda draft: draft.write_file("x", b"1"))
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path) if word == "ABSOLUTE" else word
    assert main(["checkpoint", "ls", root]) == 0
    lines = capsys.readouterr().out.splitlines()
    below = "" if word == "." else f"{root}/" if word == "runs" else f"{root}/runs/"
    runs = [line for line in lines if line and line.split()[0] not in ("step", "1", "2", "10")]
    assert runs == ([f"{below}a", f"{below}b/c"] if below else ["runs/a", "runs/b/c"])
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["2", "10", "1"]
    assert sum("last" in line for line in lines) == 2  # of each run
    assert main(["checkpoint", "ls", root, "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [2, 10, 1]
    assert main(["checkpoint", "verify", root]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["checkpoint", "verify", root, "--json"]) == 0
    assert [row["problem"] for row in json.loads(capsys.readouterr().out)] == [None] * 3


@pytest.mark.parametrize("word", [".", "inner/.."])
def test_the_working_directory_may_be_a_checkpoint(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint-2"
    Store(tmp_path).write(2, {}, lambda draft: draft.write_file("inner/x", b"1"))
    monkeypatch.chdir(path)
    assert main(["checkpoint", "ls", word]) == 0
    assert main(["checkpoint", "verify", word]) == 0
    assert f"{path}: whole, 1 files" in capsys.readouterr().out
    assert main(["checkpoint", "prune", word, "--keep-last=1"]) == 2
    assert f"name its folder, {tmp_path}\n" in capsys.readouterr().err


def test_a_run_that_ends_while_the_lock_is_awaited_keeps_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(step: int) -> None:
        Store(tmp_path).write(step, {}, lambda draft: draft.write_file("x", b"1"))

    acquire = RunLock.acquire

    def after_a_save(lock: RunLock) -> None:
        save(3)
        acquire(lock)

    save(1)
    save(2)
    monkeypatch.setattr(RunLock, "acquire", after_a_save)
    assert main(["checkpoint", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert [info.step for info in Store(tmp_path).list()] == [3]
