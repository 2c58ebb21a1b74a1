"""Reader of pickles of plain data, without unpickling.

An interpreter of opcodes that builds plain containers, numbers, text and descriptions of tensors, and nothing else. No
name in the file is imported: those that `torch.save` writes for tensors, storages and ordered maps are mapped to
functions of this module. Any other name, and any opcode that creates an object, is an error; or, where a reader needs
only some values beside objects of another program, such an object is an `Unread`, without class or content.
The allow-list consists of `_CALLS`, `STORAGES`, `DTYPES` and `_OPCODES`.

Bytes, opcodes, depth and the size of whole numbers are bounded, and so is the size of the result as a tree: a small
file can refer to one tuple many times, on every level. Opcodes: CPython's `Lib/pickletools.py`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from windlass.compat.stored_tensor import DTYPES, STORAGES, StoredTensor, Unread
from windlass.core.errors import CheckpointError

MAX_BYTES = 1 << 26  # of the pickle without the bytes of tensors
MAX_OPCODES = 1 << 23  # some thirty for each tensor
MAX_DEPTH = 64
_MAX_INT_BYTES = 1024
_MAX_NAME = 200
_MAX_DIMENSIONS = 64
_KEY = re.compile(r"[0-9A-Za-z_.-]{1,64}")

_NUMPY_CODES = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})


def read_pickle(data: bytes, what: str, storages: Mapping[str, int], *, objects: bool = False) -> Any:
    """The value in `data`: plain containers (an ordered map is a dict), numbers, text, bytes, dtypes, `StoredTensor`s.

    Args:
        what: the name of the file, for errors.
        storages: the storages of the file, and the size of each in bytes.
        objects: it may have objects, in whose place there is an `Unread`.

    Raises:
        CheckpointError: it has another content, is damaged, or exceeds a bound.
    """
    machine = _Machine(data, what, storages, objects)
    value = machine.run()
    _check_tree(value, machine)
    return value


# --- what the stack holds beside plain values


@dataclass(frozen=True, slots=True)
class _Name:
    """A function of the allow-list."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _StorageKind:
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype | None
    nbytes: int


@dataclass(slots=True)
class _NumpyType:
    """A dtype of numpy; its byte order follows in a BUILD."""

    code: str
    order: str = "<"


class _Mark:
    """The beginning of the items of a container on the stack."""


_MARK = _Mark()
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, StoredTensor, Unread)


class _Machine:
    """The stack, the memo, the position in the data, and the bytes that described tensors claim."""

    def __init__(self, data: bytes, what: str, storages: Mapping[str, int], objects: bool) -> None:
        self._data, self._what, self._storages, self._objects = data, what, storages, objects
        self._at, self._opcode_at = 0, 0
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._tensors: dict[StoredTensor, StoredTensor] = {}
        self._stored, self._claimed = sum(storages.values()), 0

    def error(self, why: str) -> CheckpointError:
        """An error with the position in the pickle."""
        return CheckpointError(f"{self._what} is not read: at byte {self._opcode_at} of its pickle, {why}")

    def run(self) -> Any:
        """Interpret until STOP; return the value."""
        if len(self._data) > MAX_BYTES:
            raise self.error(f"it has {len(self._data):,} bytes; at most {MAX_BYTES:,} are read")
        for _ in range(MAX_OPCODES):
            self._opcode_at = self._at
            code = self.take(1)[0]
            if code == _STOP:
                if len(self.stack) != 1:
                    raise self.error(f"it ends with {len(self.stack)} values instead of one")
                return self.stack[0]
            step = _OPCODES.get(code)
            if step is None:
                raise self.error(
                    f"there is opcode {_FORBIDDEN.get(code, hex(code))}, which plain data does not need"
                )
            step(self)
        raise self.error(f"there are more than {MAX_OPCODES:,} opcodes")

    # --- reading the data

    def take(self, count: int) -> bytes:
        """The next bytes."""
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise self.error("it ends too early")
        self._at += count
        return piece

    def number(self, layout: str) -> Any:
        """The next number, laid out as `struct` says."""
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))[0]

    def sized(self, layout: str) -> bytes:
        """The next bytes, their count before them."""
        return self.take(self.number(layout))

    def line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _MAX_NAME + 1)
        if end < 0:
            raise self.error("a name does not end")
        text = self.text(self.take(end - self._at))
        self.take(1)
        return text

    def text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.error("a text is not UTF-8") from None

    # --- the stack

    def pop(self, kind: Any = object) -> Any:
        """The topmost value, which must be of the given kind."""
        if not self.stack or self.stack[-1] is _MARK or not isinstance(self.stack[-1], kind):
            raise self.error("the value that an opcode needs is not there")
        return self.stack.pop()

    def top(self, kind: Any = object) -> Any:
        value = self.pop(kind)
        self.stack.append(value)
        return value

    def pops(self, count: int) -> list[Any]:
        """The `count` topmost values, the topmost last."""
        return [self.pop() for _ in range(count)][::-1]

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self.stack:
            value = self.stack.pop()
            if value is _MARK:
                items.reverse()
                return items
            items.append(value)
        raise self.error("a mark is missing")

    def put(self, index: int) -> None:
        self._memo[index] = self.top()

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise self.error("it refers to a value that it did not note")
        self.stack.append(self._memo[index])

    def extend(self, items: list[Any]) -> None:
        target = self.top((list, Unread))
        if isinstance(target, list):
            target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values, one after the other, into the map on top."""
        target = self.top((dict, Unread))
        if len(items) % 2:
            raise self.error("a map has a key without a value")
        if isinstance(target, Unread):
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Not tuples: hashing one that refers to another many times takes forever.
            if not isinstance(key, (str, int, float, bytes, type(None))):
                raise self.error(f"a key of a map is a {type(key).__name__}")
            target[key] = value

    # --- names, and what is made of them

    def name(self, module: Any, name: Any) -> None:
        """Push the object of a name, which is looked up in the tables of this module only."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.error("a name is not text")
        if (module, name) in STORAGES:
            self.stack.append(_StorageKind(STORAGES[module, name]))
        elif module == "torch" and name in DTYPES:
            self.stack.append(DTYPES[name])
        elif (module, name) in _CALLS:
            self.stack.append(_Name(module, name))
        elif self._objects:
            self.stack.append(Unread(f"{module}.{name}"[:_MAX_NAME]))
        else:
            raise self.error(
                f"it names {f'{module}.{name}'[:_MAX_NAME]!r}, which torch.load could be made to import and run. "
                "Only tensors, numbers, text, lists and maps are read from such files"
            )

    def call(self) -> None:
        """REDUCE: call a function of this module."""
        arguments = self.pop(tuple)
        named = self.pop((_Name, Unread))
        if isinstance(named, Unread):
            self.stack.append(named)
            return
        try:
            self.stack.append(_CALLS[named.module, named.name](self, *arguments))
        except (TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self.error(
                f"{named.module}.{named.name} has other arguments than torch.save gives it"
            ) from None

    def new_object(self) -> None:
        """NEWOBJ: an object of a class that is not looked up."""
        self.pop(tuple)
        if not isinstance(self.top(), Unread):
            raise self.error("there is opcode NEWOBJ, which plain data does not need")

    def build(self) -> None:
        """BUILD: ignore attributes of an ordered map (`_metadata` of a state dict); check the order of a numpy type."""
        state, target = self.pop(), self.top()
        if isinstance(target, Unread):
            return
        if isinstance(target, _NumpyType):
            if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", "|"):
                raise self.error("a number of numpy is not in little-endian order")
        elif not isinstance(target, dict) or not isinstance(state, dict):
            raise self.error("it sets attributes of an object, which plain data does not have")

    def storage(self) -> None:
        """BINPERSID: a storage of the file."""
        match self.pop(tuple):
            case ("storage", _StorageKind(dtype), str(key), str(), int(count)) if _KEY.fullmatch(key):
                nbytes = count * (1 if dtype is None else dtype.itemsize)
            case _:
                raise self.error("a reference to a storage is malformed")
        if key not in self._storages:
            raise self.error(f"it refers to the storage {key!r}, which the file does not hold")
        if self._storages[key] != nbytes:
            raise self.error(
                f"the storage {key!r} should have {nbytes:,} bytes and has {self._storages[key]:,}"
            )
        self.stack.append(_Storage(key, dtype, nbytes))

    def tensor(self, storage: _Storage, described: StoredTensor) -> StoredTensor:
        """Check that a tensor lies inside its storage, and the bytes that all tensors claim together."""
        numbers = (described.offset, *described.shape, *described.stride)
        whole = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        rank = len(described.shape)
        if not whole or rank != len(described.stride) or rank > _MAX_DIMENSIONS:
            raise self.error("the shape of a tensor is malformed")
        held, count = storage.nbytes // described.dtype.itemsize, math.prod(described.shape)
        last = sum((size - 1) * step for size, step in zip(described.shape, described.stride, strict=True))
        if count > held or (count and described.offset + last >= held):
            raise self.error(f"a tensor of shape {list(described.shape)} does not lie inside its storage")
        known = self._tensors.setdefault(described, described)
        if known is described:
            self._claimed += described.nbytes
        if self._claimed > 2 * self._stored:
            raise self.error("its tensors claim more than twice the bytes that are there")
        return known


# --- the functions of the allow-list


def _tensor_v2(machine: _Machine, storage: Any, *described: Any) -> StoredTensor:
    return _tensor(machine, storage, getattr(storage, "dtype", None), *described)


def _tensor_v3(machine: _Machine, storage: Any, *described: Any) -> StoredTensor:
    *place, grad, hooks, dtype = described[:6]
    return _tensor(machine, storage, dtype, *place, grad, hooks, *described[6:])


def _tensor(machine: _Machine, storage: Any, dtype: Any, *described: Any) -> StoredTensor:
    offset, shape, stride, _, *extras = described
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise machine.error("a tensor lies in no storage, or has no dtype")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise machine.error("the shape of a tensor is malformed")
    if any(extras):
        raise machine.error("a tensor has hooks or metadata, which are no data")
    return machine.tensor(storage, StoredTensor(storage.key, dtype, offset, shape, stride))


def _parameter(machine: _Machine, data: Any, requires_grad: Any, hooks: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor) or hooks:
        raise machine.error("a parameter is not a tensor, or has hooks")
    return data


def _with_attributes(
    machine: _Machine, function: Any, kind: Any, described: Any, attributes: Any
) -> StoredTensor:
    """A tensor that had attributes, which are not read. Its class is an object, so it is read where those may be."""
    if function != _Name("torch._utils", "_rebuild_tensor_v2") or not isinstance(kind, Unread):
        raise machine.error("a tensor is rebuilt by a function that is not known")
    return _tensor_v2(machine, *described)


def _map(machine: _Machine, content: Any = ()) -> dict[Any, Any]:
    if isinstance(content, dict):
        return dict(content)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in content):
        raise machine.error("an ordered map is made of something else than pairs")
    machine.stack.append({})
    machine.set_items([item for pair in content for item in pair])
    return machine.pop(dict)  # type: ignore[no-any-return]


def _device(machine: _Machine, kind: Any, index: Any = None) -> str:
    """The type of a device; tensors are loaded onto the host."""
    if not isinstance(kind, str):
        raise machine.error("the name of a device is malformed")
    return kind[:_MAX_NAME]


def _latin(machine: _Machine, text: Any, encoding: Any) -> bytes:
    """Bytes in the protocols before 3."""
    if not isinstance(text, str) or encoding != "latin1" or any(ord(c) > 255 for c in text):
        raise machine.error("bytes are malformed")
    return text.encode("latin1")


def _numpy_type(machine: _Machine, code: Any, align: Any = False, copy: Any = True) -> _NumpyType:
    if not isinstance(code, str) or code not in _NUMPY_CODES:
        raise machine.error("a number of numpy is of a type that is not a plain number")
    return _NumpyType(code)


def _numpy_scalar(machine: _Machine, kind: Any, data: Any) -> Any:
    if not isinstance(kind, _NumpyType) or not isinstance(data, bytes):
        raise machine.error("a number of numpy is malformed")
    dtype = np.dtype(kind.order + kind.code)
    if len(data) != dtype.itemsize:
        raise machine.error("a number of numpy has another size than its type")
    return np.frombuffer(data, dtype)[0].item()


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    ("torch", "Size"): lambda machine, sizes=(): tuple(sizes),
    ("torch", "device"): _device,
    ("collections", "OrderedDict"): _map,
    ("collections", "Counter"): _map,
    ("_codecs", "encode"): _latin,
    ("__builtin__", "bytes"): lambda machine: b"",
    ("numpy", "dtype"): _numpy_type,
    ("numpy.core.multiarray", "scalar"): _numpy_scalar,
    ("numpy._core.multiarray", "scalar"): _numpy_scalar,
}


# --- the opcodes of plain data


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _new_map(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    machine.set_items(items)


def _long(machine: _Machine, layout: str) -> int:
    count = machine.number(layout)
    if not 0 <= count <= _MAX_INT_BYTES:
        raise machine.error("a whole number is absurdly long")
    return int.from_bytes(machine.take(count), "little", signed=True)


def _protocol(machine: _Machine) -> None:
    if machine.number("B") > 5:
        raise machine.error("it is of a protocol that is not known")


_STOP = ord(".")
_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x80: _protocol,
    0x95: lambda m: m.number("Q"),  # FRAME: a hint for readers of streams
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.pop(),
    ord("1"): lambda m: m.pop_to_mark(),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: m.number("i")),
    ord("K"): _push(lambda m: m.number("B")),
    ord("M"): _push(lambda m: m.number("H")),
    0x8A: _push(lambda m: _long(m, "B")),
    0x8B: _push(lambda m: _long(m, "i")),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("X"): _push(lambda m: m.text(m.sized("I"))),
    0x8C: _push(lambda m: m.text(m.sized("B"))),
    0x8D: _push(lambda m: m.text(m.sized("Q"))),
    ord("B"): _push(lambda m: m.sized("I")),
    ord("C"): _push(lambda m: m.sized("B")),
    ord("]"): _push(lambda m: []),
    ord("}"): _push(lambda m: {}),
    ord(")"): _push(lambda m: ()),
    ord("l"): _push(lambda m: m.pop_to_mark()),
    ord("d"): _new_map,
    ord("t"): _push(lambda m: tuple(m.pop_to_mark())),
    0x85: _push(lambda m: tuple(m.pops(1))),
    0x86: _push(lambda m: tuple(m.pops(2))),
    0x87: _push(lambda m: tuple(m.pops(3))),
    ord("a"): lambda m: m.extend(m.pops(1)),
    ord("e"): lambda m: m.extend(m.pop_to_mark()),
    ord("s"): lambda m: m.set_items(m.pops(2)),
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("q"): lambda m: m.put(m.number("B")),
    ord("r"): lambda m: m.put(m.number("I")),
    0x94: lambda m: m.memoize(),
    ord("h"): lambda m: m.get(m.number("B")),
    ord("j"): lambda m: m.get(m.number("I")),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*m.pops(2)),
    0x81: lambda m: m.new_object(),
    ord("Q"): lambda m: m.storage(),
    ord("R"): lambda m: m.call(),
    ord("b"): lambda m: m.build(),
}
# Named in errors: opcodes that create objects.
_FORBIDDEN = {
    ord("i"): "INST", ord("o"): "OBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
    ord("P"): "PERSID",
}  # fmt: skip


def _check_tree(value: Any, machine: _Machine) -> None:
    """Check that the result is a bounded tree of plain values."""
    visited, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        visited += 1
        if depth > MAX_DEPTH:
            raise machine.error(f"its containers are nested more than {MAX_DEPTH} deep")
        if isinstance(item, (list, tuple, dict)):
            visited += len(item)
            if visited > MAX_OPCODES:
                raise machine.error("its containers refer to each other too often")
            inside = item.values() if isinstance(item, dict) else item
            waiting.extend((inner, depth + 1) for inner in inside)
        elif not isinstance(item, _PLAIN):
            raise machine.error("it holds a bare function or class, which is not data")
