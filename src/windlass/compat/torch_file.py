"""Reader of files of `torch.save` (`.pt`, `.pth`, `.bin`): zip containers of a pickle and the bytes of tensors.

    NAME/data.pkl       a pickle that describes the content; see `pickle_reader`
    NAME/data/0 ...     the storages, uncompressed
    NAME/byteorder      "little", if it exists

Opening a file reads the pickle only; the bytes of a tensor are read on request.
"""

from __future__ import annotations

import functools
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.deferred import Shaped, TensorSource
from windlass.checkpoint.files import Files
from windlass.compat.pickle_reader import MAX_BYTES, read_pickle
from windlass.compat.stored_tensor import StoredTensor
from windlass.core.errors import CheckpointError
from windlass.core.trees import map_leaves
from windlass.dist.sharded import Part

_MAX_READ = 1 << 24  # of the container's directory: some 200,000 storages
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of torch before 1.6, pickled
_LOCAL_HEADER = struct.Struct(
    "<26xHH"
)  # of a member: the lengths of its name and of its extra field come last
# RuntimeError includes NotImplementedError.
_BROKEN = (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, ValueError, struct.error)


class TorchFile:
    """An open file of `torch.save`.

    Attributes:
        tree: its content, with a `StoredTensor` for each tensor.

    Args:
        objects: its content may have objects that are not read (see `read_pickle`).
    """

    def __init__(self, path: Path, file: FileIO, objects: bool = False) -> None:
        self._path, self._file, self._objects = path, file, objects
        size = os.fstat(file.fileno()).st_size
        self._check_format(file)
        try:
            self._archive = zipfile.ZipFile(_Bounded(file))
        except _BROKEN as error:
            raise self._error(f"its zip container is damaged ({error})") from None
        self._entries = self._checked_entries(size)
        self._last: tuple[str, bytearray] | None = None
        self._checked: dict[
            str, int
        ] = {}  # storages whose checksums were compared -> where their bytes begin
        self.tree = self._read_tree()

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

    def _checked_entries(self, size: int) -> dict[str, zipfile.ZipInfo]:
        """The members by name without their common folder, checked to be uncompressed and inside the file."""
        infos = self._archive.infolist()
        pickles = [info.filename for info in infos if info.filename.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1 or any(info.filename.endswith("/constants.pkl") for info in infos):
            raise self._error("it is not a file of torch.save: there must be one data.pkl, and no program")
        prefix = pickles[0].removesuffix("data.pkl")
        for info in infos:
            stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            if not stored or info.flag_bits & 1:
                raise self._error(
                    f"{info.filename[:100]!r} in it is compressed or encrypted, which torch.save does not do"
                )
        if sum(info.file_size for info in infos) > size:
            raise self._error("its members claim more bytes than the file has")
        entries = {info.filename.removeprefix(prefix): info for info in infos}
        if len(entries) != len(infos):
            raise self._error("two of its members have the same name")
        return entries

    def _read_tree(self) -> Any:
        if "byteorder" in self._entries and self._member("byteorder", 16) != b"little":
            raise self._error("its numbers are not in little-endian order")
        storages = {
            name.removeprefix("data/"): info.file_size
            for name, info in self._entries.items()
            if name.startswith("data/")
        }
        pickled = self._member("data.pkl", MAX_BYTES)
        return read_pickle(pickled, str(self._path), storages, objects=self._objects)

    def _member(self, name: str, limit: int) -> bytes:
        info = self._entries[name]
        if info.file_size > limit:
            raise self._error(f"{name} in it has {info.file_size:,} bytes; at most {limit:,} are read")
        with self._opened(name) as member:
            return bytes(member.read(info.file_size))

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        try:
            with self._archive.open(self._entries[name]) as member:
                yield member
        except CheckpointError:
            raise
        except _BROKEN as error:
            raise self._error(f"{name} in it is damaged ({error})") from None

    def read(self, tensor: StoredTensor) -> Tensor:
        """One tensor on the host, in new memory."""
        if not all(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        storage = self._storage(tensor.key)
        flat = torch.frombuffer(storage, dtype=tensor.dtype, count=len(storage) // tensor.dtype.itemsize)
        view = flat.as_strided(tensor.shape, tensor.stride, tensor.offset)
        return view.clone(memory_format=torch.contiguous_format)

    def read_run(self, tensor: StoredTensor, start: int, count: int) -> Tensor:
        """Elements of the flattened tensor, read without the others. Their storage is read once, for its checksum."""
        if not tensor.is_contiguous:
            return self.read(tensor).reshape(-1)[start : start + count]
        run = torch.empty(count, dtype=tensor.dtype)
        if count:
            self._file.seek(self._begin_of(tensor.key) + (tensor.offset + start) * tensor.dtype.itemsize)
            filled, into = 0, run.view(torch.uint8).numpy().data
            while filled < len(into) and (got := self._file.readinto(into[filled:])):
                filled += got
            if filled != len(into):
                raise self._error(f"data/{tensor.key} in it ends too early")
        return run

    def _begin_of(self, key: str) -> int:
        """Where the bytes of a storage begin in the file."""
        if key not in self._checked:
            name = f"data/{key}"
            with self._opened(name) as member:
                while member.read(_MAX_READ):  # compares the checksum at its end
                    pass
            self._file.seek(self._entries[name].header_offset)
            header = self._file.read(_LOCAL_HEADER.size)
            if len(header) != _LOCAL_HEADER.size:
                raise self._error(f"{name} in it is damaged")
            lengths = sum(_LOCAL_HEADER.unpack(header))
            self._checked[key] = self._entries[name].header_offset + _LOCAL_HEADER.size + lengths
        return self._checked[key]

    def _storage(self, key: str) -> bytearray:
        """The bytes of a storage. The last one is kept, because tensors that share one are adjacent."""
        if self._last is None or self._last[0] != key:
            name = f"data/{key}"
            data = bytearray(self._entries[name].file_size)
            self._last = None
            with self._opened(name) as member:
                filled = 0
                while filled < len(data) and (piece := member.read(_MAX_READ)):
                    data[filled : filled + len(piece)] = piece
                    filled += len(piece)
            if filled != len(data):
                raise self._error(f"{name} in it ends too early")
            self._last = key, data
        return self._last[1]

    def materialised(self, tree: Any) -> Any:
        """`tree`, or a part of it, with tensors instead of their descriptions; equal ones become one tensor."""
        read = functools.cache(self.read)
        return map_leaves(read, tree, lambda item: isinstance(item, StoredTensor))


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
    """Open a file of `torch.save`. Nothing in it is ever executed.

    Args:
        objects: its content may have objects beside plain values; they are not read (see `read_pickle`).

    Raises:
        CheckpointError: it is missing, damaged, of the legacy format, or has more than tensors and plain values.
    """
    with files.reading(path) as file:
        yield TorchFile(path, file, objects)


@contextmanager
def open_weights(path: Path, files: Files) -> Iterator[TorchWeights]:
    """Open a file of `torch.save` with a state dict (see `open_torch_file`)."""
    with open_torch_file(path, files) as file:
        yield TorchWeights(path, file)


class _Bounded:
    """A file that returns a bounded number of bytes at once, whatever the directory of a container claims."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, count: int = -1) -> bytes:
        if count > _MAX_READ:
            raise zipfile.BadZipFile(f"{count:,} bytes of directory; at most {_MAX_READ:,} are read")
        return self._file.read(_MAX_READ if count < 0 else count)
