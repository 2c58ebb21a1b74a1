"""`windlass checkpoint ls` and `prune` where the content of a checkpoint is damaged, and not its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.cli.main import main


def save_two(root: Path, damaged: str, best: str | None = None) -> None:
    """Two checkpoints; in one file of the second a word is another one."""
    for step in (1, 2):
        state = {"global_step": step, "best_model_checkpoint": best}
        shared = {"trainer_state": state, "optimizer": {"class": "checkpoint-1"}}
        CheckpointManager(Store(root)).save(step, Content(shared=shared), meta={})
    path = root / "checkpoint-2" / damaged
    path.write_bytes(path.read_bytes().replace(b"checkpoint-1", b"checkpoint-7"))


def test_nothing_is_removed_beside_a_newest_one_that_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_two(tmp_path, "optimizer.json")
    assert main(["checkpoint", "prune", str(tmp_path), "--keep-last", "1"]) == 2
    assert "optimizer.json is damaged" in capsys.readouterr().err
    assert (tmp_path / "checkpoint-1").is_dir()


def test_one_whose_notes_are_damaged_is_listed_as_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_two(tmp_path, "trainer_state.json", best="checkpoint-1")
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["marks"], first["problem"], second["marks"]) == (["last", "best"], None, [])
    assert "trainer_state.json is damaged" in second["problem"]
