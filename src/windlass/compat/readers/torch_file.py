"""Reader of files of `torch.save` (`.pt`, `.pth`, `.bin`): zip containers of a pickle and the bytes of tensors.

Another process, with limits of memory and time, opens the pickle and describes the content (see `torch_reader`). This
one reads the bytes of a tensor from the file on request.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import Shaped, TensorSource
from windlass.compat.readers.reader_process import describe
from windlass.core.errors import CheckpointError
from windlass.core.trees import map_leaves
from windlass.dist.sharded import Part

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes in a file: where they begin, their number, their CRC-32."""

    begin: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor.

    Attributes:
        offset, stride: in elements; the tensor lies inside its storage.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Its elements are adjacent in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Unread:
    """In place of an object, or of a class or function: its name in the file. Nothing of that name is looked up."""

    name: str


_AT_ONCE = 1 << 24  # bytes
_MAX_DIMENSIONS = 64
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of torch before 1.6, pickled


class TorchFile:
    """An open file of `torch.save`.

    Attributes:
        tree: its content, with a `StoredTensor` for each tensor.

    Args:
        objects: its content may have objects, in whose place there is an `Unread`.
    """

    def __init__(self, path: Path, file: FileIO, objects: bool = False) -> None:
        self._path, self._file = path, file
        self._check_format(file)
        self._last: tuple[Storage, bytearray] | None = None
        self._checked: set[Storage] = set()  # storages whose checksums were compared
        description = describe(file, path, objects=objects)
        self.tree = _CheckedContent(self._error, os.fstat(file.fileno()).st_size).content(description)

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be read: {why}")

    def _check_format(self, file: FileIO) -> None:
        head = file.read(len(_LEGACY))
        if head == _LEGACY:
            raise self._error(
                "it is in the format of torch before 1.6. If you trust it, save it again where torch is installed: "
                "torch.save(torch.load(path, weights_only=True), path)"
            )
        if not head.startswith(b"PK\x03\x04"):
            raise self._error("it is not a zip container, which torch.save writes")

    def read(self, tensor: StoredTensor) -> Tensor:
        """One tensor on the host, in new memory."""
        if not all(tensor.shape):  # `frombuffer` takes no empty buffer
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._last is None or self._last[0] != tensor.storage:
            self._last = None  # freed before the next one is allocated
            self._last = tensor.storage, self._bytes(tensor.storage)
        storage = self._last[1]
        flat = torch.frombuffer(storage, dtype=tensor.dtype, count=len(storage) // tensor.dtype.itemsize)
        # The tensor gets the memory itself, which nothing else may have then.
        if tensor.is_contiguous and tensor.nbytes == len(storage):
            self._last = None
            return flat.reshape(tensor.shape)
        view = flat.as_strided(tensor.shape, tensor.stride, tensor.offset)
        return view.clone(memory_format=torch.contiguous_format)

    def read_run(self, tensor: StoredTensor, start: int, count: int) -> Tensor:
        """Elements of the flattened tensor, read without the others. Their storage is read once, for its checksum."""
        if not tensor.is_contiguous:
            return self.read(tensor).reshape(-1)[start : start + count]
        run = torch.empty(count, dtype=tensor.dtype)
        if count:
            if tensor.storage not in self._checked:
                self._check(tensor.storage)
            begin = tensor.storage.begin + (tensor.offset + start) * tensor.dtype.itemsize
            self._fill(run.view(torch.uint8).numpy().data, begin)
        return run

    def _check(self, storage: Storage) -> None:
        piece, crc = bytearray(min(_AT_ONCE, storage.nbytes)), 0
        for begin in range(0, storage.nbytes, _AT_ONCE):
            view = memoryview(piece)[: storage.nbytes - begin]
            self._fill(view, storage.begin + begin)
            crc = zlib.crc32(view, crc)
        self._compare(storage, crc)

    def _bytes(self, storage: Storage) -> bytearray:
        """The bytes of a storage. The last ones are kept, because tensors that share a storage are adjacent."""
        data = bytearray(storage.nbytes)
        self._fill(memoryview(data), storage.begin)
        self._compare(storage, zlib.crc32(data))
        return data

    def _compare(self, storage: Storage, crc: int) -> None:
        if crc != storage.crc:
            raise self._error(f"the storage at byte {storage.begin:,} in it is damaged: its checksum differs")
        self._checked.add(storage)

    def _fill(self, view: memoryview, begin: int) -> None:
        self._file.seek(begin)
        while len(view):
            count = self._file.readinto(view)
            if not count:
                raise self._error("it ends too early")
            view = view[count:]

    def materialised(self, tree: Any) -> Any:
        """`tree`, or a part of it, with tensors instead of their descriptions; equal ones become one tensor."""
        read = functools.cache(self.read)
        return map_leaves(read, tree, lambda item: isinstance(item, StoredTensor))


class _CheckedContent:
    """The content of a file from its description, which is checked: another process made it from an unknown file."""

    def __init__(self, error: Callable[[str], CheckpointError], size: int) -> None:
        self._error, self._size = error, size
        self._storages: dict[Storage, Storage] = {}
        self._tensors: dict[StoredTensor, StoredTensor] = {}
        self._stored, self._claimed = 0, 0

    def content(self, description: Any) -> Any:
        """The content of a file. Raises CheckpointError if its description is malformed, or has tensors that are not in
        the file.
        """
        try:
            return self.value(description)
        except CheckpointError:
            raise
        except (TypeError, ValueError, OverflowError, RuntimeError):
            # A key without a hash, a number that is not hexadecimal, an array of another size than its shape.
            raise self._error("its description is malformed") from None

    def value(self, found: Any) -> Any:
        """A value: plain containers (an ordered map is a dict), numbers, text, bytes, arrays, dtypes,
        devices, `StoredTensor`s."""
        if isinstance(found, list):
            return [self.value(item) for item in found]
        if not isinstance(found, dict):
            return found
        match found:
            case {"tuple": list(items)}:
                return tuple(self.value(item) for item in items)
            case {"map": list(items)} if len(items) % 2 == 0:
                return dict(zip(map(self._key, items[::2]), map(self.value, items[1::2]), strict=True))
            case {"bytes": str(text)}:
                return bytes.fromhex(text)
            case {"array": [str(name), list(shape), str(order), str(text)]} if order in "CF":
                # A copy, because an array over bytes cannot be changed.
                flat = np.frombuffer(bytes.fromhex(text), dtype=name).copy()
                return flat.reshape(shape, order="F" if order == "F" else "C")
            case {"dtype": str(name)}:
                return self._dtype(name)
            case {"device": str(name)}:
                return torch.device(name)
            case {"object": str(name)}:
                return Unread(name)
            case {
                "tensor": [int(begin), int(nbytes), int(crc), str(name), offset, list(shape), list(stride)]
            }:
                storage = self._storage(Storage(begin, nbytes, crc))
                return self._tensor(
                    StoredTensor(storage, self._dtype(name), offset, tuple(shape), tuple(stride))
                )
        raise TypeError("not a description")

    def _key(self, found: Any) -> Any:
        return self.value(found) if isinstance(found, dict) else found

    def _dtype(self, name: str) -> torch.dtype:
        if name not in DTYPES:
            raise self._error(f"a tensor in it has dtype {name[:100]!r}, which is not supported")
        return DTYPES[name]

    def _storage(self, storage: Storage) -> Storage:
        """Check that a storage lies inside the file, and that all of them together claim no more bytes than it has."""
        known = self._storages.setdefault(storage, storage)
        if known is storage:
            self._stored += storage.nbytes
            inside = 0 <= storage.begin <= self._size and 0 <= storage.nbytes <= self._size - storage.begin
            if not inside or self._stored > self._size:
                raise self._error("its members claim more bytes than the file has")
        return known

    def _tensor(self, described: StoredTensor) -> StoredTensor:
        """Check that a tensor lies inside its storage, and the bytes that all tensors claim together."""
        numbers = (described.offset, *described.shape, *described.stride)
        whole = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        rank = len(described.shape)
        if not whole or rank != len(described.stride) or rank > _MAX_DIMENSIONS:
            raise self._error("the shape of a tensor is malformed")
        held, count = described.storage.nbytes // described.dtype.itemsize, math.prod(described.shape)
        last = sum((size - 1) * step for size, step in zip(described.shape, described.stride, strict=True))
        # An expanded tensor (stride 0) has more elements than its storage.
        if count and described.offset + last >= held:
            raise self._error(f"a tensor of shape {list(described.shape)} does not lie inside its storage")
        known = self._tensors.setdefault(described, described)
        if known is described:
            self._claimed += described.nbytes
        # Tensors may share a storage: without a limit a small file could describe more than any memory holds.
        if self._claimed > 2 * self._size:
            raise self._error("its tensors claim more than twice the bytes that are there")
        return known


class TorchWeights(TensorSource):
    """The tensors of a file with a state dict.

    Attributes:
        aliases: tied name -> the name that it is stored under.

    Raises:
        CheckpointError: the file has another content.
    """

    def __init__(self, path: Path, file: TorchFile) -> None:
        tree = file.tree
        if not isinstance(tree, dict) or not all(
            isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in tree.items()
        ):
            raise CheckpointError(f"{path} holds no state dict: a map of names to tensors")
        self._file, self._tensors = file, dict[str, StoredTensor](tree)
        first: dict[StoredTensor, str] = {}
        self.aliases = {
            name: kept for name, tensor in tree.items() if (kept := first.setdefault(tensor, name)) != name
        }
        super().__init__({name: Shaped(tensor.dtype, tensor.shape) for tensor, name in first.items()})

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """A tensor, which is read whole, or this part of it."""
        tensor = self._file.read(self._tensors[name])
        return tensor if wanted is None else wanted.of(tensor)


@contextmanager
def open_torch_file(path: Path, files: Files, *, objects: bool = False) -> Iterator[TorchFile]:
    """Open a file of `torch.save`. Nothing in it is ever executed. Raises CheckpointError if it is missing, damaged, of
    the legacy format, has more than tensors and plain values, or takes too much memory or time to describe.

    Args:
        objects: its content may have objects beside plain values; they are not read (see `TorchFile`).
    """
    with files.reading(path) as file:
        yield TorchFile(path, file, objects)


@contextmanager
def open_weights(path: Path, files: Files) -> Iterator[TorchWeights]:
    """Open a file of `torch.save` with a state dict (see `open_torch_file`)."""
    with open_torch_file(path, files) as file:
        yield TorchWeights(path, file)
