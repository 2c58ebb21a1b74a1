"""What differs between two folders: files, tensors and plain values. Of tensors, one of each side is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import FileEntry
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.checkpoint.sharded import index_name
from windlass.checkpoint.stored import (
    OPTIMIZER,
    Folder,
    StoredTensors,
    find_weights,
    open_optimizer,
    open_state_file,
    open_weights,
    state_files,
)
from windlass.core.tensors import dtype_name, same_bits

_PIECE = 1 << 22  # elements that are compared at a time
_SHOWN = 60  # characters of a plain value
_PARTS = index_name("")  # the end of the name of an index, before which its stem stands


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same. `where` is a file, or what holds the tensors; `name` is what differs in it, and
    `largest` the largest difference of the elements of two tensors of one shape.
    """

    where: str
    name: str
    what: str
    largest: float | None = None


@dataclass(slots=True)
class Comparison:
    """What differs, and how many tensors have the same bits on both sides."""

    differences: list[Difference]
    equal_tensors: int = 0

    @property
    def same(self) -> bool:
        return not self.differences


def compare(first: Folder, second: Folder) -> Comparison:
    """Compare two checkpoints, or folders of a model; they may have been written in different layouts."""
    for folder in (first, second):
        # Raises if one of them has none, before anything of the other is read.
        find_weights(folder)
    found = Comparison([])
    for where, opener in _tensor_groups(first, second):
        _compare_groups(found, where, opener, first, second)
    for name in sorted(_plain_files(first) | _plain_files(second)):
        found.differences.extend(_file_differences(name, first, second))
    return found


_Opener = Callable[[Folder], AbstractContextManager[StoredTensors] | None]


def _tensor_groups(first: Folder, second: Folder) -> Iterator[tuple[str, _Opener]]:
    yield "model", open_weights
    indices = {name for name in first.names | second.names if name.endswith(_PARTS)}
    stems = sorted({OPTIMIZER, *(name.removesuffix(_PARTS) for name in indices)} - {"model"})
    for stem in stems:
        yield stem, partial(_open_stem, stem)
    whole = {f"{stem}.safetensors" for stem in stems}
    for name in sorted({*state_files(first), *state_files(second)} - whole):
        yield name, lambda folder, name=name: open_state_file(folder, name) if name in folder else None  # type: ignore[misc]


def _open_stem(stem: str, folder: Folder) -> AbstractContextManager[StoredTensors] | None:
    names = {f"{stem}.safetensors", index_name(stem)}
    return open_optimizer(folder, stem) if names & folder.names else None


def _compare_groups(found: Comparison, where: str, opener: _Opener, first: Folder, second: Folder) -> None:
    left, right = opener(first), opener(second)
    if left is None or right is None:
        if left is not right:
            found.differences.append(Difference(where, "", "removed" if right is None else "added"))
        return
    with left as one, right as other:
        for name in sorted({*one.names, *other.names, *one.aliases, *other.aliases}):
            difference = _tensor_difference(one, other, where, name)
            if difference is None:
                found.equal_tensors += 1
            else:
                found.differences.append(difference)


def _tensor_difference(one: StoredTensors, other: StoredTensors, where: str, name: str) -> Difference | None:
    left, right = one.aliases.get(name, name), other.aliases.get(name, name)
    if left not in one or right not in other:
        return Difference(where, name, "added" if left not in one else "removed")
    if one.shape(left) != other.shape(right):
        return Difference(where, name, f"shape {list(one.shape(left))} became {list(other.shape(right))}")
    before, after = one.dtype(left), other.dtype(right)
    a, b = one.read(left).reshape(-1), other.read(right).reshape(-1)
    if same_bits(a, b):
        return None
    names = map(dtype_name, (before, after))
    changed = "" if before == after else "dtype {} became {}, ".format(*names)
    largest = _largest_difference(a, b)
    return Difference(where, name, f"{changed}max abs difference {largest:.6g}", largest)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    largest = torch.zeros((), dtype=torch.float64)
    # Cast to real numbers, complex ones would lose their imaginary parts.
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    for start in range(0, a.numel(), _PIECE):
        piece = a[start : start + _PIECE].to(wide) - b[start : start + _PIECE].to(wide)
        # Not Python's `max`, which would lose a NaN.
        largest = torch.maximum(largest, piece.abs().max())
    return float(largest)


# --- files without tensors

# The keys on the way to a value. Joined, a slash within a key would look like one between two.
_Path = tuple[str, ...]


def _plain_files(folder: Folder) -> set[str]:
    return {
        name for name in folder.names if not name.endswith((".safetensors", _PARTS)) and name != MANIFEST_NAME
    }


def _file_differences(name: str, first: Folder, second: Folder) -> Iterator[Difference]:
    if name not in first or name not in second:
        yield Difference(name, "", "added" if name not in first else "removed")
        return
    if _entry(first, name) == _entry(second, name):
        return
    if not name.endswith(".json"):
        yield Difference(name, "", "content differs")
        return
    before, after = _values(first, name), _values(second, name)
    for path in sorted(before.keys() | after.keys()):
        key = "/".join(path)
        if path not in before or path not in after:
            yield Difference(name, key, "added" if path not in before else "removed")
        elif before[path] != after[path]:
            yield Difference(name, key, f"{before[path][:_SHOWN]} became {after[path][:_SHOWN]}")


def _entry(folder: Folder, name: str) -> FileEntry:
    return folder.files.digest(folder.path / name)


def _values(folder: Folder, name: str) -> dict[_Path, str]:
    """The plain values of a JSON tree, as text, by their path."""
    # Configurations of other programs may hold NaN and infinities.
    return dict(_leaves(strict_json.read(folder.path / name, folder.files, allow_nan=True), ()))


def _leaves(tree: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None or not tree:
        yield path, json.dumps(tree)
        return
    for key, item in items:
        yield from _leaves(item, (*path, str(key)))
