"""Weights in parts as one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.faults import write_parts

from windlass.cli.main import main
from windlass.core.world import World

WEIGHTS = {"a": torch.rand(3, 2), "b": torch.tensor(4)}


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_parts(folder, "model", WEIGHTS, World())
    return folder


def test_merged_and_kept(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(parts), str(tmp_path / "whole")]) == 0
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    assert "sha256" in capsys.readouterr().out
    assert parts.exists()


def test_merged_and_removed(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(parts), str(tmp_path / "whole"), "--remove_checkpoint_dir", "--json"]
    assert main(["merge-weights", *words]) == 0
    found, written = json.loads(capsys.readouterr().out), tmp_path / "whole" / "model.safetensors"
    assert (found["written"], found["removed"]) == (str(written), [str(parts)])
    assert found["bytes"] == written.stat().st_size
    assert not parts.exists()
    assert (tmp_path / "whole" / "model.safetensors").exists()


def test_what_is_refused(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        ([str(parts), str(empty), "--unsafe_serialization"], "--unsafe_serialization=True"),
        ([str(empty), str(tmp_path / "out")], "there is no model.parts.json"),
        ([str(parts), str(parts / "in"), "--remove_checkpoint_dir"], "would be removed"),
    ]
    for words, message in cases:
        assert main(["merge-weights", *words]) == 2
        assert message in capsys.readouterr().err
    (parts / "manifest.json").touch()
    assert main(["merge-weights", str(parts), str(empty), "--remove_checkpoint_dir"]) == 2
    assert "all else that a run resumes with" in capsys.readouterr().err
    (parts / "manifest.json").unlink()
    assert not any(empty.iterdir())
    main(["merge-weights", str(parts), str(empty)])
    assert main(["merge-weights", str(parts), str(empty)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_missing_part_leaves_no_result(parts: Path, tmp_path: Path) -> None:
    next(parts.glob("*.safetensors")).unlink()
    assert main(["merge-weights", str(parts), str(tmp_path / "whole")]) == 2
    assert not (tmp_path / "whole" / "model.safetensors").exists()
