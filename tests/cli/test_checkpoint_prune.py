"""What `windlass checkpoint prune` prints for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoint.faults import save

from windlass.cli.main import main


def test_what_is_pruned_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, limit=None)
    command = ["checkpoint", "prune", str(tmp_path), "--keep-last", "1", "--json"]
    found = []
    for words in (["--dry-run"], []):
        assert main([*command, *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    before, after = found
    assert (before["removed"], after["removed"]) == (False, True)
    assert [one["step"] for one in before["checkpoints"]] == [1, 2]
    assert before["checkpoints"] == after["checkpoints"]
    assert not any(Path(one["path"]).exists() for one in after["checkpoints"])
