"""Tensors in ranks' parts: what a damaged or contradictory folder is refused for (several ranks: `fsdp_ranks.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from windlass.checkpoint.files import Files
from windlass.checkpoint.sharded import load_parts, merge_parts, open_parts, rank_file, write_parts
from windlass.checkpoint.tensor_file import write_tensors
from windlass.checkpoint.weights import load_weights
from windlass.core.errors import CheckpointError
from windlass.core.world import World
from windlass.dist.sharded import Part

ROWS = torch.arange(15.0).reshape(5, 3)


def two_ranks(folder: Path) -> dict[str, Any]:
    """A folder as two ranks leave it, which hold 3 and 2 rows; gives its index."""
    for rank, rows in enumerate((ROWS[:3], ROWS[3:])):
        write_tensors(folder / rank_file("model", rank), {"weight": rows}, files=Files())
    entry = {"dtype": "F32", "shape": [5, 3], "dim": 0, "parts": [[0, 0, 3], [1, 3, 2]]}
    index = {"version": 1, "ranks": 2, "aliases": {"tied": "weight"}, "tensors": {"weight": entry}}
    (folder / "model.parts.json").write_text(json.dumps(index))
    return index


def test_any_part_is_put_together(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    with open_parts(tmp_path, "model") as parts:
        assert parts.names == ["weight"]
        assert torch.equal(parts.read("weight"), ROWS)
        for begin in range(5):
            for size in range(6 - begin):
                wanted = Part((begin, 1), (size, 2))
                assert torch.equal(parts.read("weight", wanted), ROWS[begin : begin + size, 1:])


def test_plain_tensors_are_written_by_the_main_process(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(2, 3))
    module[2].weight = module[0].weight
    state = module.state_dict(keep_vars=True)
    assert write_parts(tmp_path, "model", state, World(1, 2, 1, 2)) == {}
    written = write_parts(tmp_path, "model", state, World(0, 2, 0, 2))
    assert set(written) == {"model.parts.json", "model-rank-00000.safetensors"}
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(2, 3))
    other[2].weight = other[0].weight
    load_parts(tmp_path, other)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    merge_parts(tmp_path, tmp_path / "merged")
    load_weights(tmp_path / "merged", other)
    with pytest.raises(CheckpointError, match="missing in the file"):
        load_parts(tmp_path, nn.Linear(2, 3))


def test_names_are_those_of_the_bare_model(tmp_path: Path) -> None:
    layer, other = nn.Linear(2, 3), nn.Linear(2, 3)
    wrapped = nn.Module()
    wrapped._checkpoint_wrapped_module = layer
    write_parts(tmp_path, "model", wrapped.state_dict(keep_vars=True), World())
    load_parts(tmp_path, other)
    assert torch.equal(layer.weight, other.weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index.update(version=2), "of version 2"),
        (lambda index: index.pop("aliases"), "malformed"),
        (lambda index: index["aliases"].update(other="gone"), "ties names to tensors that it does not have: other"),
        (lambda index: weight(index).update(parts=[[0, 0, 3]]), "leave rows out"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [1, 2, 3]]), "overlap or leave rows out"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [2, 3, 2]]), "outside its range"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [1, 3, 2.0]]), "whole numbers"),
        (lambda index: weight(index).update(dim=2), "malformed"),
        (lambda index: weight(index).update(dtype="F99"), "malformed"),
        (lambda index: weight(index).update(dtype="F64"), "does not hold 'weight'"),
        (lambda index: weight(index).update(shape=[5, 4]), "does not hold 'weight'"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong_is_refused(
    change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path
) -> None:
    index = two_ranks(tmp_path)
    change(index)
    (tmp_path / "model.parts.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said), open_parts(tmp_path, "model") as parts:
        parts.read("weight")


def weight(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["weight"]  # type: ignore[no-any-return]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    (tmp_path / rank_file("model", 1)).unlink()
    with open_parts(tmp_path, "model") as parts:
        assert torch.equal(parts.read("weight", Part((0, 0), (3, 3))), ROWS[:3]), "the rest can be read"
        with pytest.raises(CheckpointError, match=r"model-rank-00001\.safetensors is missing"):
            parts.read("weight")


def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"phase has dtype torch\.complex64"):
        write_parts(tmp_path, "model", {"phase": torch.ones(2, dtype=torch.complex64)}, World())
