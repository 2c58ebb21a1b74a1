"""Tensors in ranks' parts: what a damaged or contradictory folder is refused for (several ranks: `fsdp_ranks.py`)."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import CountingFiles, Ranks, failing, write_parts
from torch import nn

from windlass.checkpoint.content import Content
from windlass.checkpoint.export import ExportOptions, export_file
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.sharded import RankParts, load_parts, open_parts, parts_of_rank, rank_file
from windlass.checkpoint.store import Store
from windlass.checkpoint.stored import open_folder
from windlass.checkpoint.tensor_file import write_tensors
from windlass.checkpoint.weights import load_weights
from windlass.core.errors import CheckpointError
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.dist.sharded import Held, Part

ROWS = torch.arange(15.0).reshape(5, 3)


def two_ranks(folder: Path) -> dict[str, Any]:
    """A folder as two ranks leave it, which hold 3 and 2 rows; return its index."""
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


def four_ranks(folder: Path) -> dict[str, Any]:
    """As four ranks leave it, each of which holds a block of rows and columns."""
    blocks = [[rank, [3 * (rank // 2), 2 * (rank % 2)], [3 - rank // 2, 2 - rank % 2]] for rank in range(4)]
    for rank, offsets, sizes in blocks:
        block = Part(tuple(offsets), tuple(sizes)).of(ROWS).contiguous()  # type: ignore[arg-type]
        write_tensors(folder / rank_file("model", rank), {"weight": block}, files=Files())  # type: ignore[arg-type]
    entry = {"dtype": "F32", "shape": [5, 3], "blocks": blocks}
    index = {"version": 2, "ranks": 4, "aliases": {}, "tensors": {"weight": entry}}
    (folder / "model.parts.json").write_text(json.dumps(index))
    return index


def test_any_part_is_put_together_from_blocks(tmp_path: Path) -> None:
    four_ranks(tmp_path)
    with open_parts(tmp_path, "model") as parts:
        assert torch.equal(parts.read("weight"), ROWS)
        for begin in range(4):
            assert torch.equal(parts.read("weight", Part((begin, 1), (2, 2))), ROWS[begin : begin + 2, 1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda blocks: blocks.pop(), "overlap or leave rows out"),
        (lambda blocks: blocks.append(blocks[0]), "overlap or leave rows out"),
        (lambda blocks: blocks[3][1].__setitem__(1, 1), "overlap or leave rows out"),
        (lambda blocks: blocks[3][2].__setitem__(1, 2), "overlap or leave rows out"),
        (lambda blocks: blocks[3][1].append(0), "outside its range"),
        (lambda blocks: blocks[3].__setitem__(0, 4), "outside its range"),
        (lambda blocks: blocks[3][1].__setitem__(0, -1), "whole numbers"),
        (lambda blocks: blocks[3].__setitem__(1, 3), "malformed"),
    ],
)
def test_blocks_that_do_not_cover_a_tensor_once_are_refused(
    change: Callable[[list[Any]], Any], said: str, tmp_path: Path
) -> None:
    index = four_ranks(tmp_path)
    change(weight(index)["blocks"])
    (tmp_path / "model.parts.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said), open_parts(tmp_path, "model"):
        pass


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
    export_file(open_folder(tmp_path), tmp_path / "merged.safetensors", ExportOptions())
    load_weights(tmp_path / "merged.safetensors", other)
    with pytest.raises(CheckpointError, match="missing in the file"):
        load_parts(tmp_path, nn.Linear(2, 3))


@pytest.mark.parametrize("sizes", [(1, 1), (900, 1)])
def test_what_two_ranks_hold_is_written_once_and_by_both_of_them(sizes: tuple[int, int]) -> None:
    """Each rank finds out by itself which it writes, though values of a module may differ in size between them."""
    blocks = [(Part((0,), (4,)), (0, 1))]
    written = []
    for rank, size in enumerate(sizes):
        state = {name: Held(torch.zeros(4), torch.arange(4.0), blocks) for name in ("one", "other")}
        values = {"norm._extra_state": torch.zeros(size)}
        gang = Gang(World(rank, 2))
        written.append(set(parts_of_rank("model", {**values, **state}, gang).tensors))
    assert written[0] == {"norm._extra_state", *written[0] & {"one", "other"}}
    assert len(written[1]) == 1
    assert written[0].isdisjoint(written[1])
    assert written[0] | written[1] == {"norm._extra_state", "one", "other"}


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
        (lambda index: index.update(version=3), "of version 3"),
        (lambda index: index.pop("aliases"), "malformed"),
        (lambda index: index["aliases"].update(other="gone"), "ties names to tensors that it does not have: other"),
        (lambda index: index["aliases"].update(other=[1]), "ties names to tensors that it does not have: other"),
        (lambda index: weight(index).update(parts=[[0, 0, 3]]), "leave rows out"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [1, 2, 3]]), "overlap or leave rows out"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [2, 3, 2]]), "outside its range"),
        (lambda index: weight(index).update(parts=[[0, 0, 3], [1, 3, 2.0]]), "whole numbers"),
        (lambda index: weight(index).update(dim=2), "malformed"),
        (lambda index: weight(index).update(dtype="F99"), "malformed"),
        (lambda index: weight(index).update(dtype="F64"), "does not hold 'weight'"),
        (lambda index: weight(index).update(shape=[5, 4]), "does not hold 'weight'"),
        (lambda index: weight(index).update(shape=[1 << 50], parts=[[0, 0, 1 << 50]]), "does not hold 'weight'"),
        (lambda index: weight(index).update(shape=[5, 1 << 50]), "does not hold 'weight'"),
        (lambda index: weight(index).update(shape=[0, 1 << 61, 1 << 61], parts=[]), "cannot be allocated"),
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
    with pytest.raises(CheckpointError, match=r"phase has dtype torch\.float8_e8m0fnu"):
        write_parts(tmp_path, "model", {"phase": torch.ones(2, dtype=torch.float8_e8m0fnu)}, World())


# --- as part of a checkpoint of two ranks


def save_in_parts(root: Path, step: int, failing_rank: int = -1, at: int = 0) -> tuple[list[Any], int]:
    """What saving gives on each of two ranks that hold 3 and 2 rows of `weight + step`, and how many operations on the
    disk rank 1 made; on one of them the disk fails at an operation.
    """
    ranks, counted = Ranks(2), CountingFiles()

    def body(rank: int) -> Path | None:
        files = CountingFiles(at, failing(errno.EIO)) if rank == failing_rank else CountingFiles()
        if rank == 1:
            nonlocal counted
            counted = files
        return CheckpointManager(ranks.store(rank, root, files)).save(
            step,
            Content({"state": {"step": step}}, {"step": {"value": step}}, parts=[rows_of(rank, step)]),
            meta={},
        )

    return ranks.run(body), counted.count


def rows_of(rank: int, step: int) -> RankParts:
    entry = {"dtype": "F32", "shape": [5, 3], "dim": 0, "parts": [[0, 0, 3], [1, 3, 2]]}
    index = {"version": 1, "ranks": 2, "aliases": {}, "tensors": {"weight": entry}}
    rows = ROWS[3 * rank : 3 * rank + 3] + step
    return RankParts("model", rank, {"weight": rows}, index if rank == 0 else None)


def loaded_rows(root: Path) -> tuple[Path | None, torch.Tensor | None]:
    """The newest checkpoint that verifies, and the weight in it."""
    store = Store(root)
    path, _ = store.newest_verified()
    if path is None:
        return None, None
    layer = nn.Linear(3, 5, bias=False)
    CheckpointManager(store).load(path).load_weights(layer)
    return path, layer.weight.detach()


@pytest.mark.parametrize(
    "name", ["model-rank-00000.safetensors", "model-rank-00001.safetensors", "model.parts.json"]
)
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damage_to_any_ranks_part_is_found_before_anything_is_loaded(
    name: str, damage: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        assert save_in_parts(tmp_path, step)[0] == [tmp_path / f"checkpoint-{step}"] * 2
    path = tmp_path / "checkpoint-2" / name
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(content if damage == "changed" else content[:-1])
    with pytest.raises(CheckpointError, match=name):
        CheckpointManager(Store(tmp_path)).load(tmp_path / "checkpoint-2")
    found, weight = loaded_rows(tmp_path)
    assert found == tmp_path / "checkpoint-1"
    assert weight is not None
    assert torch.equal(weight, ROWS + 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_on_one_rank_costs_at_most_this_checkpoint(rank: int, tmp_path: Path) -> None:
    _, count = save_in_parts(tmp_path / "counted", 1)
    assert count > 5
    for at in range(1, count + 1):
        root = tmp_path / str(at)
        save_in_parts(root, 1)
        outcome, _ = save_in_parts(root, 2, rank, at)
        assert outcome in ([None, None], [root / "checkpoint-2"] * 2), f"operation {at}: ranks agree"
        found, weight = loaded_rows(root)
        step = 1 if outcome[0] is None else 2
        assert found == root / f"checkpoint-{step}", f"operation {at}"
        assert weight is not None
        assert torch.equal(weight, ROWS + step)
