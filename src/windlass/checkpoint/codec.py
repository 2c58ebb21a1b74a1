"""How a state becomes a file pair: `NAME.json` (the tree) and `NAME.safetensors` (its tensors, if any).

JSON values are written as they are. A value that JSON lacks is an object with one key that starts with `$`:

    {"$tensor": "a/b"}                 the tensor of that name in the safetensors file; with "complex": true its last
                                       axis holds real and imaginary parts
    {"$bytes": "a/b"}                  bytes, as a tensor of uint8
    {"$array": "a/b"}                  the same as a numpy array; with "scalar": true a numpy scalar
    {"$float": "nan" | "inf" | "-inf"}
    {"$tuple": [...]}
    {"$map": [[key, value], ...]}      a map with whole-number keys, or with a string key that starts with `$`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.tensor_file import (
    CODES,
    Deferred,
    TensorFile,
    TensorSource,
    check_tensor,
    nbytes,
    open_tensors,
    write_tensors,
)
from windlass.core.errors import CheckpointError
from windlass.core.module_state import EXTRA_STATE
from windlass.core.tensors import same_bits
from windlass.core.types import State
from windlass.dist.sharded import Part, is_sharded

MAX_DEPTH = 100
MAX_INT_BITS = 8192  # Python refuses to parse much longer ones
_IN_FILE = ("$tensor", "$array", "$bytes")  # tags that refer to the safetensors file
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state that is split already: its JSON tree, and the tensors that the tree refers to."""

    tree: Any
    tensors: Mapping[str, Tensor]


def encoded(state: State | Encoded) -> Encoded:
    """A state split by `encode`, unless it is already."""
    return state if isinstance(state, Encoded) else Encoded(*encode(state))


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into a JSON tree and named tensors. The tensors are the state's own, not copies."""
    encoder = _Encoder()
    return encoder.value(state, ()), encoder.tensors


def state_bytes(state: Any, depth: int = 0) -> int:
    """Bytes of the tensors and arrays of a state, unchecked."""
    if isinstance(state, Encoded):
        state = list(state.tensors.values())
    if isinstance(state, Tensor):
        return nbytes(state)
    if isinstance(state, np.ndarray):
        return int(state.nbytes)
    if isinstance(state, dict | list | tuple) and depth <= MAX_DEPTH:  # a cycle is refused later, by name
        items = state.values() if isinstance(state, dict) else state
        return sum(state_bytes(item, depth + 1) for item in items if not _is_plain(item))
    return 0


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise CheckpointError(
                f"state {_show(path[:5])}... is nested more than {MAX_DEPTH} deep (a cycle?)"
            )
        # By type, here and below: a subclass (an `IntEnum`, `numpy.float64`, a named tuple) would come back as
        # its base.
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if value.bit_length() > MAX_INT_BITS:
                bits = value.bit_length()
                raise CheckpointError(
                    f"state {_show(path)} is a whole number of {bits} bits; too long to save"
                )
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if isinstance(value, dict):
            return self._map(value, path)
        if isinstance(value, Tensor):
            return self._tensor("$tensor", value, path)
        if kind is bytes:
            # A copy: torch warns of memory that it cannot write.
            return self._tensor("$bytes", torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy()), path)
        # A masked array would come back without its mask.
        if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
            return self._array(value, path)
        raise CheckpointError(
            f"state {_show(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; tensors, numpy "
            "arrays, numbers, strings, bytes, booleans, None, lists, tuples and maps with str or int keys can"
        )

    def _items(self, values: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> list[Any]:
        return [
            item if _is_plain(item) else self.value(item, (*path, str(i))) for i, item in enumerate(values)
        ]

    def _map(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if type(key) is not str and type(key) is not int:
                kind = type(key).__name__
                raise CheckpointError(
                    f"state {_show(path)} has a key {key!r} of type {kind}; only str and int keys can be saved"
                )
        pairs = [
            (key, item if _is_plain(item) else self.value(item, (*path, str(key))))
            for key, item in value.items()
        ]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$map": [list(pair) for pair in pairs]}

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: tuple[str, ...]) -> Any:
        if (
            value.dtype.kind not in "biufc"
            or value.dtype.itemsize > 16
            or value.dtype.name in ("float128", "longdouble")
        ):
            raise CheckpointError(
                f"state {_show(path)} is a numpy value of dtype {value.dtype}; it cannot be saved"
            )
        # Torch knows native bytes only.
        array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        tree = self._tensor("$array", torch.from_numpy(array), path)
        return tree | {"scalar": True} if isinstance(value, np.generic) else tree

    def _tensor(self, tag: str, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        if tensor.is_complex():
            # torch refuses the view of a tensor that is marked as conjugated only.
            tensor, tree = torch.view_as_real(tensor.detach().resolve_conj()), {"complex": True}
        check_tensor(tensor, f"state {_show(path)}")
        name = stem = "/".join(path) or "value"
        count = 1
        while name in self.tensors:  # two paths may spell the same name: a -> "b/c" and a -> b -> c
            count += 1
            name = f"{stem}#{count}"
        self.tensors[name] = tensor
        return {tag: name} | tree


def _is_plain(value: Any) -> bool:
    """Return True for values that JSON has: a state may have 100,000 numbers, and building a path costs time."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    return kind is str or kind is bool or value is None or (kind is int and -(1 << 63) <= value < 1 << 63)


def decode(tree: Any, tensors: TensorFile | dict[str, Tensor]) -> Any:
    """Rebuild what `encode` split. Each tensor is read once, when its place in the tree is reached."""
    return _Decoder(tensors).value(tree, ())


class _Decoder:
    """
    Args:
        deferred: tensors of a file are not read: each becomes a `Deferred` (arrays are read).
    """

    def __init__(self, tensors: TensorFile | dict[str, Tensor], deferred: bool = False) -> None:
        self._tensors, self._deferred = tensors, deferred
        self._taken: set[str] = set()

    def value(self, tree: Any, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"state is nested more than {MAX_DEPTH} deep")
        if isinstance(tree, list):
            return [self.value(item, (*path, str(i))) for i, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item, (*path, key)) for key, item in tree.items()}
        try:
            return self._tagged(tag, tree, path)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"state {_show(path)} is malformed: {tag} with {type(tree[tag]).__name__}"
            ) from None

    def _tagged(self, tag: str, tree: dict[str, Any], path: tuple[str, ...]) -> Any:
        content = tree[tag]
        if tag == "$float":
            return _FLOATS[content]
        if tag == "$tuple" and isinstance(content, list):
            return tuple(self.value(item, (*path, str(i))) for i, item in enumerate(content))
        if tag == "$map" and isinstance(content, list):
            return self._map(content, path)
        if (
            tag == "$tensor"
            and tree.keys() == {tag}
            and self._deferred
            and isinstance(self._tensors, TensorFile)
        ):
            return Deferred(self._name(content, path), self._tensors)
        if tag == "$tensor":
            return self._tensor(content, tree, path)
        if tag == "$bytes":
            return self._tensor(content, tree, path).numpy().tobytes()
        if tag == "$array":
            array = self._tensor(content, tree, path).numpy()
            return array[()] if tree.get("scalar") else array
        raise CheckpointError(f"state {_show(path)} has the unknown tag {tag[:40]!r}")

    def _map(self, pairs: list[Any], path: tuple[str, ...]) -> dict[Any, Any]:
        if not all(type(key) is str or type(key) is int for key, _ in pairs):
            raise CheckpointError(f"state {_show(path)} is a map with keys that are neither str nor int")
        return {key: self.value(item, (*path, str(key))) for key, item in pairs}

    def _name(self, name: Any, path: tuple[str, ...]) -> str:
        """The name of a tensor that the tree refers to, checked."""
        if not isinstance(name, str) or name not in self._tensors:
            raise CheckpointError(
                f"state {_show(path)} refers to tensor {str(name)[:100]!r}, which is not in the file"
            )
        # Windlass never writes this. Accepting it would let a small file exhaust memory.
        if name in self._taken:
            raise CheckpointError(f"state {_show(path)} refers to tensor {name[:100]!r} a second time")
        self._taken.add(name)
        return name

    def _tensor(self, content: Any, tree: dict[str, Any], path: tuple[str, ...]) -> Tensor:
        name = self._name(content, path)
        tensor = self._tensors[name] if isinstance(self._tensors, dict) else self._tensors.read(name)
        return torch.view_as_complex(tensor) if tree.get("complex") else tensor


def state_files(name: str, state: State | Encoded) -> set[str]:
    """The files that `save_state` writes; of a state that is not split yet, those that are certain."""
    tree, tensors = _pair(Path(name))
    return {tree.name, tensors.name} if isinstance(state, Encoded) and state.tensors else {tree.name}


def save_state(stem: Path, state: State | Encoded, files: Files | None = None) -> dict[str, FileEntry]:
    """Write `STEM.json` and, if there are tensors, `STEM.safetensors`; return size and hash by file name."""
    files = files or Files()
    split = encoded(state)
    tree, tensors = split.tree, split.tensors
    tree_path, tensor_path = _pair(stem)
    written = {}
    if tensors:
        written[tensor_path.name] = write_tensors(tensor_path, tensors, files=files)
    written[tree_path.name] = files.write(tree_path, [strict_json.dump(tree, tree_path.name)])
    return written


def load_state(stem: Path, files: Files | None = None) -> State:
    """Read what `save_state` wrote; tensors come on the host, each in memory of its own."""
    with open_state(stem, files, deferred=False) as state:
        return state


@contextmanager
def open_state(stem: Path, files: Files | None = None, *, deferred: bool = True) -> Iterator[State]:
    """As `load_state`; if `deferred`, with a `Deferred` in place of each tensor, which can be read in the context."""
    files = files or Files()
    tree_path, tensor_path = _pair(stem)
    tree = strict_json.read(tree_path, files)
    source: AbstractContextManager[TensorFile | dict[str, Tensor]] = nullcontext({})
    if refers_to_tensors(tree):
        source = open_tensors(tensor_path, files)
    with source as tensors:
        try:
            state = _Decoder(tensors, deferred).value(tree, ())
        except CheckpointError as error:
            raise CheckpointError(f"{tree_path}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{tree_path} holds a {type(state).__name__}, not a map")
        yield state


def refers_to_tensors(tree: Any) -> bool:
    """Return True if a tree that `encode` made refers to tensors."""
    stack = [tree]  # a file may be nested deeper than Python calls
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            if not node.keys().isdisjoint(_IN_FILE):
                return True
            stack.extend(node.values())
    return False


def _pair(stem: Path) -> tuple[Path, Path]:
    # Not `with_suffix`, which would cut at a dot inside the name.
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".safetensors")


def _show(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "(the whole)"


# --- values in a model's state dict
#
# A value that is not a tensor (`get_extra_state` may return any), or is one that safetensors has no dtype for, is
# stored as tensors, so that every layout of weights (one file, several files, parts of ranks) holds values too:
#
#     NAME#json            the tree, as the bytes of strict JSON (uint8)
#     NAME#tensors/PATH    each tensor in it

_TREE, _TENSORS = "#json", "#tensors/"


def as_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict in which every entry is a tensor. Applied to its own result it changes nothing."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        entries = {name: value} if is_one_tensor(value) else _entries(name, value)
        taken = entries.keys() & found.keys()
        if taken:
            raise CheckpointError(f"model state {min(taken)!r} exists twice; rename it in the model")
        found |= entries
    return found


def is_one_tensor(value: Any) -> bool:
    """Return True if an entry of a state dict is stored as one tensor of its name."""
    if not isinstance(value, Tensor):
        return False
    return not value.is_complex() or value.dtype in CODES or is_sharded(value)


def _entries(name: str, value: Any) -> dict[str, Tensor]:
    try:
        tree, tensors = encode(value)
    except CheckpointError as error:
        raise CheckpointError(f"model state {name!r} is a {type(value).__name__}: {error}") from None
    # Not bytes: torch warns of memory that it cannot write.
    text = bytearray(strict_json.dump(tree, name))
    entries = {f"{name}{_TREE}": torch.frombuffer(text, dtype=torch.uint8)}
    return entries | {f"{name}{_TENSORS}{path}": tensor for path, tensor in tensors.items()}


def is_of_value(name: str) -> bool:
    """Return True if a stored tensor is a value or a part of one: ranks may have different ones of it."""
    return name.endswith((_TREE, EXTRA_STATE)) or _TENSORS in name


class StoredValues:
    """The values in a source of tensors.

    Args:
        extra: names in the model of values that may also be stored as a tensor of that name, of any shape.
    """

    def __init__(self, source: TensorSource, extra: frozenset[str]) -> None:
        self._source = source
        trees = [name.removesuffix(_TREE) for name in source.names if name.endswith(_TREE)]
        self._tensors: dict[str, dict[str, str]] = {name: {} for name in trees}
        for name in source.names:
            owner, _, path = name.partition(_TENSORS)
            if owner in self._tensors and path:
                self._tensors[owner][path] = name
        self.names = frozenset(trees) | {name for name in extra if name in source}
        self._hidden = {f"{name}{_TREE}" for name in trees} | set(extra)
        self._hidden |= {name for paths in self._tensors.values() for name in paths.values()}

    def read(self, name: str) -> Any:
        """One value; its tensors are on the host."""
        if name not in self._tensors:
            return self._source.read(name)
        text = self._source.read(f"{name}{_TREE}")
        if text.dtype != torch.uint8 or text.dim() != 1:
            raise CheckpointError(f"{name}{_TREE} is not the bytes of a JSON tree")
        tree = strict_json.parse(text.numpy().tobytes(), f"{name}{_TREE}")
        tensors = {path: self._source.read(stored) for path, stored in self._tensors[name].items()}
        return decode(tree, tensors)

    def others(self) -> TensorSource:
        """The tensors of the source that are not part of a value."""
        return _Others(self._source, self._hidden) if self._hidden else self._source


class _Others(TensorSource):
    """A source of tensors, some of them left out."""

    def __init__(self, source: TensorSource, hidden: set[str]) -> None:
        super().__init__({name: source.shaped(name) for name in source.names if name not in hidden})
        self._source = source

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        return self._source.read(name, wanted)


def same_value(one: Any, other: Any) -> bool:
    """Return True if both would be saved as the same bits."""
    (tree, tensors), (other_tree, others) = encode(one), encode(other)
    if strict_json.dump(tree, "a value") != strict_json.dump(other_tree, "a value"):
        return False
    return all(same_bits(tensors[name], others[name]) for name in tensors)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of a model's own methods, while it takes or gives its state, become errors that name `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
