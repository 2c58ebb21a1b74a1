"""Tensors in the parts of ranks: each rank writes its own, and any number of ranks reads them.

    STEM.parts.json                   every tensor's global shape and dtype, and which rank wrote which rows of it
    STEM-rank-00000.safetensors       the parts of rank 0; one such file for each rank that wrote any

Writing sends no tensor between ranks, and reading opens only the files with the requested rows. The index:

    {"version": 1, "ranks": 2, "aliases": {"head.weight": "embed.weight"}, "tensors": {"embed.weight": {
        "dtype": "F32", "shape": [11, 7], "dim": 0, "parts": [[0, 0, 6], [1, 6, 5]]}}}

where a part is [rank, first row, rows] along dimension `dim`. An entry with `"flat": true` is divided between any two
elements: its parts count elements in row-major order, and the files hold them one-dimensional. One that is divided
along several dimensions (sharded layers of tensor parallelism) has `"blocks": [[rank, offsets, sizes], ...]` in place
of `dim` and `parts`, in an index of version 2. If several ranks have copies of a part (hybrid sharding),
the one with the fewest bytes so far writes it; plain tensors, which may differ between ranks, are the first one's. Tied
tensors are written once, under the first of their names. If there are several disks, each has an index, with the first
of its own ranks that has a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.codec import is_of_value
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.tensor_file import (
    CODES,
    DTYPES,
    Shaped,
    TensorFile,
    TensorSource,
    empty_host,
    nbytes,
    open_tensors,
    write_tensors,
)
from windlass.checkpoint.weights import fill, stored_state
from windlass.core.errors import CheckpointError
from windlass.core.types import State
from windlass.dist.flat import FlatParts
from windlass.dist.gang import Gang
from windlass.dist.sharded import Held, Part, all_holders, holders, is_sharded, local

VERSION = 2  # 1: no tensor is divided along several dimensions


def index_name(stem: str) -> str:
    return f"{stem}.parts.json"


def rank_file(stem: str, rank: int) -> str:
    return f"{stem}-rank-{rank:05d}.safetensors"


# --- writing


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of a set of tensors that one rank writes."""

    stem: str
    rank: int
    tensors: Mapping[str, Tensor]  # plain tensors by canonical name; a snapshot may replace them by copies
    index: State | None  # of the rows of all tensors; on the first rank of the folder, which writes it

    def names(self) -> set[str]:
        """The files that `write` creates."""
        own = {rank_file(self.stem, self.rank)} if self.tensors else set()
        return own if self.index is None else {*own, index_name(self.stem)}

    def write(self, folder: Path, files: Files) -> dict[str, FileEntry]:
        """Write into `folder`; return what was written, by file name."""
        written = {}
        if self.tensors:
            path = folder / rank_file(self.stem, self.rank)
            written[path.name] = write_tensors(path, self.tensors, files=files)
        if self.index is not None:
            path = folder / index_name(self.stem)
            written[path.name] = files.write(path, [strict_json.dump(self.index, path.name)])
        return written


def parts_of_rank(
    stem: str, tensors: Mapping[str, Tensor], all_ranks: Gang, members: Sequence[int] | None = None
) -> RankParts:
    """This rank's parts of `tensors`; the first rank also has the index. Not collective.

    Args:
        tensors: the same names in the same order on every rank; plain tensors are the first rank's. They are
            stored under canonical names (no wrapper prefixes).
        members: the ranks that write into the same folder; all by default.
    """
    stored, aliases = stored_state(tensors)
    here = range(all_ranks.size) if members is None else members
    # With several disks ranks choose differently, so work is only balanced if all share one.
    load = dict.fromkeys(here, 0) if len(here) == all_ranks.size else {}
    by_size = sorted(stored, key=lambda name: -nbytes(stored[name]))  # large ones first: small ones even out
    # Values may differ in size between ranks, which must all choose the same writers.
    writers = {
        name: _writers(stored[name], here, {} if is_of_value(name) else load)
        for name in by_size
        if not isinstance(stored[name], FlatParts)
    }
    index = {
        name: _flat_entry(tensor) if isinstance(tensor, FlatParts) else _entry(name, tensor, writers[name])
        for name, tensor in stored.items()
    }
    mine = {
        name: local(stored[name])
        for name, entry in index.items()
        if any(rank == all_ranks.rank for rank, *_ in entry.get("parts") or entry["blocks"])
    }
    version = VERSION if any("blocks" in entry for entry in index.values()) else 1
    tree = {"version": version, "ranks": all_ranks.size, "aliases": aliases, "tensors": index}
    return RankParts(stem, all_ranks.rank, mine, tree if all_ranks.rank == here[0] else None)


def _writers(tensor: Tensor, here: Sequence[int], load: dict[int, int]) -> list[tuple[int, Part]]:
    """The writer of each part: the least loaded of its holders, or the first if `load` is empty. `load`: bytes of each
    rank so far; those of this tensor are added.
    """
    chosen = holders(tensor, here)
    if load and (is_sharded(tensor) or isinstance(tensor, Held)):
        # By number among equals: every rank computes this for itself, and all must choose the same writer.
        chosen = [(min(ranks, key=lambda rank: (load[rank], rank)), p) for p, ranks in all_holders(tensor)]
    for rank, found in chosen if load else ():
        load[rank] += math.prod(found.sizes) * tensor.element_size()
    return chosen


def _entry(name: str, tensor: Tensor, held: Sequence[tuple[int, Part]]) -> dict[str, Any]:
    cut = {dim for _, found in held for dim, size in enumerate(found.sizes) if size != tensor.shape[dim]}
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
    if len(cut) > 1:
        blocks = [[rank, list(found.offsets), list(found.sizes)] for rank, found in held]
        return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "blocks": blocks}
    dim = cut.pop() if cut else 0
    # A scalar is one row.
    parts = [
        [rank, found.offsets[dim], found.sizes[dim]] if found.sizes else [rank, 0, 1] for rank, found in held
    ]
    return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "dim": dim, "parts": parts}


def _flat_entry(tensor: FlatParts) -> dict[str, Any]:
    parts = [list(piece) for piece in tensor.pieces]
    return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "dim": 0, "flat": True, "parts": parts}


# --- reading


@dataclass(frozen=True, slots=True)
class _Stored(Shaped):
    blocks: tuple[tuple[int, Part], ...]  # the rank that wrote each
    flat: bool = False


@contextmanager
def open_parts(folder: Path, stem: str, files: Files | None = None) -> Iterator[Parts]:
    """Open the parts that ranks wrote; the file of a rank is opened at the first read from it."""
    with ExitStack() as opened:
        yield Parts(folder, stem, files or Files(), opened)


class Parts(TensorSource):
    """Tensors that ranks wrote, readable whole or in any part.

    Attributes:
        aliases: tied name -> the name it is stored under.
    """

    def __init__(self, folder: Path, stem: str, files: Files, opened: ExitStack) -> None:
        self._folder, self._stem, self._files = folder, stem, files
        self._opened, self._by_rank = opened, dict[int, TensorFile]()
        path = folder / index_name(stem)
        self.path = path
        index = strict_json.read(path, self._files)
        try:
            if index["version"] not in range(1, VERSION + 1):
                raise CheckpointError(
                    f"{path} is of version {index['version']}; this release reads up to {VERSION}"
                )
            self._tensors = {name: _stored(entry, index["ranks"]) for name, entry in index["tensors"].items()}
            self.aliases: dict[str, str] = dict(index["aliases"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is malformed: {error}") from None
        astray = [
            name
            for name, kept in self.aliases.items()
            if not isinstance(kept, str) or kept not in self._tensors
        ]
        if astray:
            raise CheckpointError(f"{path} ties names to tensors that it does not have: {shorten(astray)}")
        super().__init__(self._tensors)

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        stored = self._tensors[name]
        wanted = wanted or Part((0,) * len(stored.shape), stored.shape)
        if stored.flat:
            return self._read_flat(name, stored, wanted)
        return self._read_blocks(name, stored, wanted)

    def _read_flat(self, name: str, stored: _Stored, wanted: Part) -> Tensor:
        """The rows that hold `wanted`, as one run of elements, and `wanted` of them."""
        if not stored.shape:
            return self._read_blocks(name, stored, Part((0,), (1,))).reshape(())
        inner = math.prod(stored.shape[1:])
        first, rows = wanted.offsets[0], wanted.sizes[0]
        run = self._read_blocks(name, stored, Part((first * inner,), (rows * inner,)))
        within = Part((0, *wanted.offsets[1:]), wanted.sizes)
        return within.of(run.reshape(rows, *stored.shape[1:]))

    def _read_blocks(self, name: str, stored: _Stored, wanted: Part) -> Tensor:
        found = [(rank, block, block.common(wanted)) for rank, block in stored.blocks]
        touched = [(rank, block, common) for rank, block, common in found if common is not None]
        # Before memory is allocated: the files bound the sizes that the index may claim.
        files = [self._file_of(name, stored, rank, block) for rank, block, _ in touched]
        result = empty_host(wanted.sizes, stored.dtype, f"{self.path}: tensor {name[:100]!r}")
        for (_, block, common), file in zip(touched, files, strict=True):
            file.read_into(common.within(wanted).of(result), name, common.within(block))
        return result

    def _file_of(self, name: str, stored: _Stored, rank: int, block: Part) -> TensorFile:
        """The file of a part, checked against the index."""
        path = self._folder / rank_file(self._stem, rank)
        if rank not in self._by_rank:
            self._by_rank[rank] = self._opened.enter_context(open_tensors(path, self._files))
        file = self._by_rank[rank]
        if name not in file or file.shape(name) != block.sizes or file.dtype(name) != stored.dtype:
            raise CheckpointError(f"{path} does not hold {name!r} as {self.path.name} says")
        return file


def load_parts(folder: Path, model: nn.Module, *, stem: str = "model", files: Files | None = None) -> None:
    """Copy weights that ranks wrote into `model`, in place; every rank reads its own part (see `load_weights`)."""
    with open_parts(folder, stem, files) as parts:
        fill(parts.path, parts, parts.aliases, model)


def _stored(entry: Any, ranks: int) -> _Stored:
    """An entry of the index; its parts are checked to cover each element once."""
    dtype, shape, flat = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry.get("flat", False) is True
    _check_whole(shape)
    divided = (math.prod(shape),) if flat else shape
    if "blocks" in entry:
        blocks = [(rank, Part(tuple(offsets), tuple(sizes))) for rank, offsets, sizes in entry["blocks"]]
    else:
        blocks = [(rank, _rows(divided, entry["dim"], first, rows)) for rank, first, rows in entry["parts"]]
    for rank, block in blocks:
        _check_whole((rank, *block.offsets, *block.sizes))
        if rank >= ranks or not len(block.offsets) == len(block.sizes) == len(divided):
            raise ValueError("a dimension or a rank lies outside its range")
    if math.prod(shape):
        _check_cover(divided, [block for _, block in blocks])
    return _Stored(dtype, shape, tuple(blocks), flat)


def _check_whole(numbers: tuple[Any, ...]) -> None:
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a shape or a part is not made of whole numbers")


def _rows(shape: tuple[int, ...], dim: Any, first: Any, rows: Any) -> Part:
    """The part of a tensor with these rows along `dim`; a scalar is one row."""
    _check_whole((dim, first, rows))
    if not shape:
        if (dim, first, rows) != (0, 0, 1):
            raise ValueError("a dimension or a rank lies outside its range")
        return Part((), ())
    if dim >= len(shape):
        raise ValueError("a dimension or a rank lies outside its range")
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = first, rows
    return Part(tuple(offsets), tuple(sizes))


def _check_cover(shape: tuple[int, ...], blocks: list[Part]) -> None:
    """Raise ValueError unless blocks are all fields of a grid over the whole tensor, each once."""
    fields = 1
    for dim, length in enumerate(shape):
        position = 0
        stretches = sorted({(block.offsets[dim], block.sizes[dim]) for block in blocks})
        for offset, size in stretches:
            if offset != position:
                raise ValueError("parts of a tensor overlap or leave rows out")
            position += size
        if position != length:
            raise ValueError("parts of a tensor leave rows out")
        fields *= len(stretches)
    if not len(blocks) == len(set(blocks)) == fields:
        raise ValueError("parts of a tensor overlap or leave rows out")
