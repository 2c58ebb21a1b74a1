"""Reading and writing safetensors files, tensor by tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, then the tensors' bytes,
which the offsets tile without holes. Written here rather than by the package so that every byte passes through
`Files` (hashed on its way, faults injected in tests) and never more than one tensor is copied to host memory;
both directions are tested against the package.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import FileEntry, Files
from windlass.core.errors import CheckpointError
from windlass.core.locations import LFS_BEGIN, LFS_FIX
from windlass.core.tensors import bits_of
from windlass.dist.flat import FlatParts
from windlass.dist.sharded import Part, part

MAX_HEADER_BYTES = 1 << 25  # some 250,000 tensors; a larger header is an attack or a broken file
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
_AT_ONCE = 1 << 24  # bytes that are read at once of what does not lie together in the file


# --- stored tensors, of which a part is read once it is needed


@dataclass(frozen=True, slots=True)
class Shaped:
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def empty_host(sizes: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
    """A tensor in host memory. A file may claim a size that cannot be allocated: `what` names it in the error."""
    try:
        return torch.empty(sizes, dtype=dtype)
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{what} cannot be allocated: {error}") from None


class TensorSource(ABC):
    """Stored tensors by name.

    Args:
        tensors: dtype and shape of each.
    """

    def __init__(self, tensors: Mapping[str, Shaped]) -> None:
        self._shaped = tensors

    @property
    def names(self) -> list[str]:
        return list(self._shaped)

    def __contains__(self, name: object) -> bool:
        return name in self._shaped

    def shaped(self, name: str) -> Shaped:
        return self._shaped[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shaped[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._shaped[name].dtype

    @abstractmethod
    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """A tensor, or this part of it, on the host."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A stored tensor that is yet to be read, in a state whose other values are read already."""

    name: str
    source: TensorSource

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.shape(self.name))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype(self.name)

    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, wanted: Part | None = None) -> Tensor:
        return self.source.read(self.name, wanted)


def read_held(source: TensorSource, name: str, like: Tensor) -> Tensor:
    """What this rank holds of a stored tensor, if it holds of it what it holds of `like`."""
    if isinstance(like, FlatParts):
        return read_run(source, name, like.start, like.mine.numel())
    return source.read(name, part(like))


def read_run(source: TensorSource, name: str, start: int, length: int) -> Tensor:
    """A run of the elements of a stored tensor in row-major order, one-dimensional, on the host. Reads the rows that
    hold it. `start`: index of the first element in the flattened tensor.
    """
    shape = source.shape(name)
    if not shape or not length:
        return source.read(name).reshape(-1)[start : start + length] if length else torch.empty(0)
    inner = math.prod(shape[1:])
    first, end = start // inner, -(-(start + length) // inner)
    rows = Part((first, *(0,) * (len(shape) - 1)), (end - first, *shape[1:]))
    flat = source.read(name, rows).reshape(-1)
    return flat[start - first * inner :][:length]


# --- writing


def check_tensor(tensor: Tensor, what: str) -> None:
    """Refuse by name what this format cannot hold. Raises CheckpointError for sparse, quantised, sharded (DTensor), on
    the meta device, or of a dtype without a code.
    """
    if type(tensor).__name__ == "DTensor":
        raise CheckpointError(f"{what} is a DTensor; gather it (`full_tensor()`) before it is saved")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        raise CheckpointError(f"{what} is a {kind} tensor; only plain dense tensors can be saved")
    if tensor.is_meta:
        raise CheckpointError(f"{what} is on the meta device: it has no data to save")
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{what} has dtype {tensor.dtype}, which safetensors cannot hold")


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, files: Files
) -> FileEntry:
    """Write a safetensors file. Tensors may be on any device, with any strides; one at a time is copied to the host."""
    for name, tensor in tensors.items():
        check_tensor(tensor, f"{path.name}: {name}")
    shaped = {name: Shaped(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return stream_tensors(path, shaped, tensors.__getitem__, metadata, files=files)


def stream_tensors(
    path: Path,
    shaped: Mapping[str, Shaped],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    files: Files,
) -> FileEntry:
    """Write a safetensors file whose tensors are made one by one by `read`; `shaped` has their dtypes and shapes."""
    # Wide types first, as the package does it: every tensor is aligned to its own element size.
    order = sorted(shaped, key=lambda name: (-shaped[name].dtype.itemsize, name))
    header = _header(order, shaped, metadata)
    return files.write(path, _chunks(header, order, read))


def _header(order: list[str], shaped: Mapping[str, Shaped], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in order:
        tensor = shaped[name]
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = strict_json.dump(header, "the header of a safetensors file").rstrip()
    # The data begins at a multiple of 8 bytes, as in files of the package: readers map it into memory.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(shaped):,} tensors are too many for one safetensors file")
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, order: list[str], read: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for name in order:
        yield bits_of(read(name).cpu()).numpy().data


@dataclass(frozen=True, slots=True)
class _Slot(Shaped):
    begin: int
    end: int


class TensorFile(TensorSource):
    """An open safetensors file, its header checked in full before anything is allocated."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file = path, file
        size = os.fstat(file.fileno()).st_size
        header = self._read_header(size)
        metadata = header.pop("__metadata__", {})
        if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
            raise self._error("its metadata is not a map of strings")
        self.metadata: dict[str, str] = metadata
        self._slots = {name: self._slot(name, entry) for name, entry in header.items()}
        self._check_tiling(size - self._data_start)
        super().__init__(self._slots)

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a readable safetensors file: {why}")

    def _read_header(self, size: int) -> dict[str, Any]:
        if size < 8:
            raise self._error(f"it has only {size} bytes")
        length = int.from_bytes(self._read_bytes(8), "little")
        if length == int.from_bytes(LFS_BEGIN[:8], "little"):
            raise CheckpointError(f"{self._path} {LFS_FIX}")
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise self._error(f"its header claims {length:,} bytes in a file of {size:,}")
        self._data_start = 8 + length
        header = strict_json.parse(self._read_bytes(length), f"the header of {self._path}")
        if not isinstance(header, dict):
            raise self._error("its header is not a map")
        return header

    def _read_bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            # A read may return fewer bytes than were asked for.
            count = self._file.readinto(view)
            if not count:
                raise self._error("it ends too early")
            view = view[count:]

    def _slot(self, name: str, entry: Any) -> _Slot:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            raise self._error(f"the entry of tensor {name[:100]!r} is malformed") from None
        if not whole or end - begin != math.prod(shape) * dtype.itemsize:
            raise self._error(f"shape and size of tensor {name[:100]!r} do not agree")
        return _Slot(dtype, tuple(shape), begin, end)

    def _check_tiling(self, data_size: int) -> None:
        position = 0
        # By its end too: a tensor without elements begins where the next one does.
        for slot in sorted(self._slots.values(), key=lambda slot: (slot.begin, slot.end)):
            if slot.begin != position:
                raise self._error("its tensors overlap or leave holes")
            position = slot.end
        if position != data_size:
            raise self._error(f"its tensors need {position:,} bytes and it holds {data_size:,}")

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        """One tensor, or this part of it, on the host in memory of its own. Rows that are not wanted are not read."""
        slot = self._slots[name]
        wanted = wanted or Part((0,) * len(slot.shape), slot.shape)
        tensor = empty_host(wanted.sizes, slot.dtype, f"{self._path}: tensor {name[:100]!r}")
        self.read_into(tensor, name, wanted)
        return tensor

    def read_into(self, target: Tensor, name: str, wanted: Part) -> None:
        """Fill `target`, a host tensor of the tensor's dtype and of the part's sizes, with any strides."""
        slot = self._slots[name]
        if not target.numel():
            return
        if target.is_contiguous() and wanted.sizes[1:] == slot.shape[1:]:
            self._read_rows(slot, wanted.offsets[0] if slot.shape else 0, target)
            return
        row = Part((0, *wanted.offsets[1:]), (1, *wanted.sizes[1:]))
        at_once = min(max(_AT_ONCE // _row_bytes(slot), 1), wanted.sizes[0])
        block = torch.empty((at_once, *slot.shape[1:]), dtype=slot.dtype)
        for start in range(0, wanted.sizes[0], at_once):
            rows = block[: wanted.sizes[0] - start]
            self._read_rows(slot, wanted.offsets[0] + start, rows)
            inside = Part(row.offsets, (len(rows), *row.sizes[1:])).of(rows)
            target[start : start + len(rows)].copy_(inside)

    def _read_rows(self, slot: _Slot, first: int, target: Tensor) -> None:
        self._file.seek(self._data_start + slot.begin + first * _row_bytes(slot))
        self._fill(bits_of(target).numpy().data)


def _row_bytes(slot: _Slot) -> int:
    """Bytes between the first elements of two rows; a scalar is one row."""
    return math.prod(slot.shape[1:]) * slot.dtype.itemsize


@contextmanager
def open_tensors(path: Path, files: Files) -> Iterator[TensorFile]:
    """Open a safetensors file for reading."""
    with files.reading(path) as file:
        yield TensorFile(path, file)
