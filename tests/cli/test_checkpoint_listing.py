"""`windlass checkpoint ls` where the content of a checkpoint is damaged, and not its size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.cli.main import main


def test_one_whose_notes_are_damaged_is_listed_as_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        state = {"global_step": step, "best_model_checkpoint": "checkpoint-1"}
        CheckpointManager(Store(tmp_path)).save(step, Content(shared={"trainer_state": state}), meta={})
    notes = tmp_path / "checkpoint-2" / "trainer_state.json"
    notes.write_bytes(notes.read_bytes().replace(b"checkpoint-1", b"checkpoint-7"))
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["marks"], first["problem"], second["marks"]) == (["last", "best"], None, [])
    assert "trainer_state.json is damaged" in second["problem"]
