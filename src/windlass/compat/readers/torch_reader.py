"""The process that reads files of `torch.save`. `reader_process` runs this file as a script and sends it open files.

Each file is read by `torch.load(weights_only=True)` in a fork with little memory and time, which writes no file and
starts no process. Nothing else opens a pickle. The answer is a line of JSON: plain values, and descriptions of tensors.

    null, true, 1, 1.5, "text", [...]            themselves
    {"tuple": [...]}, {"map": [key, value, ...]}, {"bytes": "hexadecimal"}, {"dtype": "float32"}, {"device": "cuda:1"}
    {"array": [dtype, shape, order, "hexadecimal"]}                   an array of numpy, in order "C" or "F"
    {"tensor": [begin, nbytes, crc, dtype, offset, shape, stride]}    its storage (bytes), its place there (elements)
    {"object": "name"}                           an object of another program, which was not created
    {"error": "reason"}                          instead of the whole answer

A second line has the reason if the process was ended, and is empty otherwise.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, BinaryIO

if sys.platform != "win32":
    import resource

OBJECTS, PLAIN = b"o", b"p"  # what a file may hold: objects beside plain values, or not
MAX_PICKLE = 1 << 26  # bytes of the pickle; the limits below grow with the file up to this size
MAX_DEPTH = 64
_IDLE_SECONDS = 10.0
# Of one file: bytes of memory, seconds of the processor, bytes of the answer. A tensor takes some 150 bytes of the
# pickle, 1.5 kB of memory, 0.06 ms (0.4 ms before torch 2.11), and 100 bytes of the answer.
_MEMORY, _MEMORY_FACTOR = 1 << 28, 32
_SECONDS, _SECONDS_PER_MIB = 2, 4
_ANSWER, _ANSWER_FACTOR, MAX_ANSWER = 1 << 20, 16, 1 << 27
_VALUE = 24  # what a value counts in the answer beside its text: who reads "[]" needs 64 bytes for it, twice
# Of a member: the lengths of its name and of its extra field come last.
_LOCAL_HEADER = struct.Struct("<26xHH")
# In a pickle, the function that `torch.load` makes a tensor of such a kind with.
_SPECIAL = re.compile(rb"ctorch\._utils\n_rebuild_(sparse|q|nested)_?tensor\n")
_NUMPY_TYPES = {
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "b1": "?",
}


class RefusedFileError(Exception):
    """Why a file is not read."""


# --- in place of what `torch.load` does not know


class _Unread:
    """In place of an object, whatever it is made of."""

    name = ""

    def __new__(cls, *args: Any, **options: Any) -> _Unread:
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Nothing of it is kept."""

    def __setstate__(self, state: Any) -> None:
        """Nothing of it is kept."""


class _NumpyType:
    """A dtype of numpy; its byte order follows as its state."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self.code = code
        self.layout, self.order = _NUMPY_TYPES.get(code) if isinstance(code, str) else None, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = {"<": "<", "|": "<"}.get(state[1], "")


def _numpy_number(kind: Any, data: Any) -> Any:
    if not isinstance(kind, _NumpyType) or not kind.layout or not kind.order:
        raise RefusedFileError("a value of numpy in it is not a plain number in little-endian order")
    return struct.unpack(kind.order + kind.layout, data)[0]


class _NumpyArray:
    """An array of numpy; all of it follows as its state: version, shape, dtype, column-major order, bytes."""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, kind, columns, self.data = state
        if (
            not isinstance(kind, _NumpyType)
            or not kind.layout
            or not kind.order
            or type(self.data) is not bytes
        ):
            raise RefusedFileError("an array of numpy in it is not of plain numbers in little-endian order")
        self.dtype, self.order = kind.order + kind.code, "F" if columns else "C"


def _new_array(*args: Any) -> _NumpyArray:
    return _NumpyArray()


def _empty_map(*args: Any) -> dict[Any, Any]:
    """A map with a default, which is not kept."""
    return {}


# Values that torch.save writes under names that torch.load refuses.
_PLAIN_NAMES: list[tuple[Any, str]] = [
    (_NumpyType, "numpy.dtype"),
    (_numpy_number, "numpy.core.multiarray.scalar"),
    (_numpy_number, "numpy._core.multiarray.scalar"),
    (_NumpyArray, "numpy.ndarray"),
    (_new_array, "numpy.core.multiarray._reconstruct"),
    (_new_array, "numpy._core.multiarray._reconstruct"),
    (bytes, "builtins.bytes"),
]
_MAPS: list[tuple[Any, str]] = [(_empty_map, "collections.defaultdict")]  # other objects can't have items


# --- reading


def _members(file: BinaryIO) -> dict[int, tuple[int, int]]:
    """Where the bytes of each storage begin in a file -> their number, their CRC-32."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        pickles = [info for info in infos if info.filename.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1 or any(info.filename.endswith("/constants.pkl") for info in infos):
            raise RefusedFileError(
                "it is not a file of torch.save: there must be one data.pkl, and no program"
            )
        prefix = pickles[0].filename.removesuffix("data.pkl")
        for info in infos:
            stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            if not stored or info.flag_bits & 1:
                name = info.filename[:100]
                raise RefusedFileError(
                    f"{name!r} in it is compressed or encrypted, which torch.save does not do"
                )
        # Of two with one name, torch may read another one than this module has looked at.
        if len(archive.NameToInfo) != len(infos):
            raise RefusedFileError("two of its members have the same name")
        if pickles[0].file_size > MAX_PICKLE:
            raise RefusedFileError(
                f"data.pkl in it has {pickles[0].file_size:,} bytes; at most {MAX_PICKLE:,} are read"
            )
        order = archive.NameToInfo.get(prefix + "byteorder")
        if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
            raise RefusedFileError("its numbers are not in little-endian order")
        archive.read(pickles[0])  # compares its checksum
    storages = [info for info in infos if info.filename.startswith(prefix + "data/")]
    return {_begin(file, info): (info.file_size, info.CRC) for info in storages}


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    lengths: int = sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size)))
    return info.header_offset + _LOCAL_HEADER.size + lengths


def _load(file: BinaryIO, objects: bool) -> Any:
    """The content of a file, with tensors without memory."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    with safe_globals([*_PLAIN_NAMES, *(_MAPS if objects else ())]):
        file.seek(0)
        names = sorted(get_unsafe_globals_in_checkpoint(file))
        if names and not objects:
            raise RefusedFileError(
                f"it names {names[0][:200]!r}, which torch.load could be made to import and run. Only tensors, "
                "numbers, text, lists and maps are read from such files"
            )
        inert: list[Any] = [(type("_Unread", (_Unread,), {"name": name[:200]}), name) for name in names]
        file.seek(0)
        with safe_globals(inert), _noting_offsets():
            try:
                return torch.load(file, map_location="meta", weights_only=True)
            except Exception:
                # Those of torch do not name such tensors. Only after a failure: text may have these names too.
                file.seek(0)
                found = _SPECIAL.search(file.read(MAX_PICKLE))
                if found is not None:
                    kind = {b"sparse": "sparse", b"q": "quantized", b"nested": "nested"}[found[1]]
                    raise RefusedFileError(f"a tensor in it is {kind}") from None
                raise


def _noting_offsets() -> contextlib.AbstractContextManager[Any]:
    """Have `torch.load` note where the bytes of storages are: before torch 2.11 it does so for fake tensors alone."""
    import torch

    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 11):
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


class _Description:
    """The JSON of a value, piece by piece."""

    def __init__(self, members: dict[int, tuple[int, int]], objects: bool, limit: int) -> None:
        self._members, self._objects, self._limit, self._left = members, objects, limit, limit
        self.pieces: list[str] = []

    def _add(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise RefusedFileError(
                f"the description of its content exceeds {self._limit:,} bytes: its containers or texts refer to each "
                "other too often"
            )
        self.pieces.append(text)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value. Raises RefusedFileError if it is not plain, its tensors are not in the file, or it exceeds a
        bound.
        """
        import torch

        if depth > MAX_DEPTH:
            raise RefusedFileError(f"its containers are nested more than {MAX_DEPTH} deep")
        kind = type(value)
        if value is None or kind is bool:
            self._add(json.dumps(value))
            return
        self._left -= _VALUE
        if kind in (int, float, str):
            self._add(json.dumps(value))
        elif kind is list:
            self._items(value, depth)
        elif kind in (tuple, torch.Size):
            self._add('{"tuple":')
            self._items(value, depth)
            self._add("}")
        elif kind in (dict, OrderedDict, Counter):
            self._map(value, depth)
        elif kind is bytes:
            self._add(f'{{"bytes":"{value.hex()}"}}')
        elif kind is _NumpyArray:
            self._add(json.dumps({"array": [value.dtype, value.shape, value.order, value.data.hex()]}))
        elif kind is torch.dtype:
            self._add(f'{{"dtype":"{str(value).removeprefix("torch.")}"}}')
        elif kind is torch.device:
            self._add(json.dumps({"device": str(value)}))
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif self._objects:
            self._object(value if isinstance(value, type) else kind)
        else:
            raise RefusedFileError(f"it holds a {kind.__name__}, which is not plain data")

    def _items(self, items: Any, depth: int) -> None:
        self._add("[")
        for number, item in enumerate(items):
            if number:
                self._add(",")
            self.add(item, depth + 1)
        self._add("]")

    def _map(self, items: dict[Any, Any], depth: int) -> None:
        for key in items:
            if not isinstance(key, (str, int, float, bytes, type(None))):
                raise RefusedFileError(f"a key of a map in it is a {type(key).__name__}")
        self._add('{"map":')
        self._items((part for pair in items.items() for part in pair), depth)
        self._add("}")

    def _tensor(self, tensor: Any) -> None:
        import torch

        special = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        if special or (type(tensor).__module__, type(tensor).__name__) not in _TENSORS:
            if self._objects and not special:
                self._object(type(tensor))
                return
            raise RefusedFileError("a tensor in it is sparse, quantized, conjugated or of a class of its own")
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin not in self._members:
            raise RefusedFileError("the bytes of a tensor are not in it")
        nbytes, crc = self._members[begin]  # not what the storage says, which is wrong before torch 2.11
        name = str(tensor.dtype).removeprefix("torch.")
        place = (tensor.storage_offset(), list(tensor.shape), list(tensor.stride()))
        self._add(json.dumps({"tensor": [begin, nbytes, crc, name, *place]}))

    def _object(self, kind: type) -> None:
        name = kind.name if issubclass(kind, _Unread) else f"{kind.__module__}.{kind.__qualname__}"
        self._add(json.dumps({"object": name}))


_TENSORS = {
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
}


def _described(file: BinaryIO, objects: bool, limit: int) -> str:
    members = _members(file)
    description = _Description(members, objects, limit)
    description.add(_load(file, objects))
    return "".join(description.pieces)


def _reason(error: BaseException) -> str:
    """The one line of an error of `torch.load` that has the reason; the rest advises to trust the file."""
    if isinstance(error, RefusedFileError):
        return str(error)
    if error.__suppress_context__:
        error = error.__context__ or error  # the one without that advice
    text = str(error).strip() or type(error).__name__
    if text.startswith("Bad CRC-32"):  # of `zipfile`
        return (
            f"it is damaged, or was saved after torch.serialization.set_crc32_options(False) ({text[:300]})"
        )
    opcode = re.match(r"Unsupported operand (\d+)", text)
    if opcode is not None:
        return (
            f"its pickle has opcode 0x{int(opcode[1]):02x}, which torch.load(weights_only=True) refuses. torch.save "
            "writes such files with another pickle_protocol than 2, which is its default"
        )
    return f"it is damaged, or not a file of torch.save ({text.splitlines()[0][:300]})"


# --- the process


def limits(size: int) -> tuple[int, int, int]:
    """What may be used for a file of `size` bytes: bytes of memory, seconds of the processor, bytes of the answer."""
    counted = min(size, MAX_PICKLE)
    answer = min(_ANSWER + _ANSWER_FACTOR * size, MAX_ANSWER)
    return _MEMORY + _MEMORY_FACTOR * counted, _SECONDS + _SECONDS_PER_MIB * counted // (1 << 20), answer


def _limit(memory: int, seconds: int) -> None:
    """Limit this process, to less where the system does so already. Linux alone limits memory."""
    wanted = dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC), (0, 0))
    # SIGXCPU at the first limit, by which `_ended` knows the reason; SIGKILL at the second.
    wanted[resource.RLIMIT_CPU] = (seconds, seconds + 1)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        wanted[resource.RLIMIT_AS] = (used + memory, used + memory)
    for kind, (soft, hard) in wanted.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def _read(descriptor: int, answer: int, objects: bool) -> None:
    """Read one file within its limits, and write the answer."""
    with open(descriptor, "rb") as file:
        memory, seconds, length = limits(os.fstat(descriptor).st_size)
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # what libraries print before they end a process
        _limit(memory, seconds)
        try:
            text = _described(file, objects, length)
        except MemoryError:
            text = json.dumps({"error": f"reading it takes more than {memory >> 20:,} MiB of memory"})
        except Exception as error:
            text = json.dumps({"error": _reason(error)})
    with open(answer, "wb") as out:
        out.write(text.encode("ascii"))


def _ended(status: int, seconds: int) -> str:
    """Why a process was ended; empty if it was not."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {seconds} seconds of the processor"
    return f"the process that read it ended with {'exit code' if code > 0 else 'signal'} {abs(code)}"


def _requests(channel: socket.socket) -> Iterator[tuple[bytes, int, int]]:
    """Yield what is requested, the open file, and where the answer goes; end if no further request comes."""
    while select.select([channel], [], [], _IDLE_SECONDS)[0]:
        kind, descriptors, _, _ = socket.recv_fds(channel, 1, 2)
        if len(descriptors) != 2:
            return
        yield kind, descriptors[0], descriptors[1]


def _warm_up() -> None:
    """Read a file without tensors: what is imported and looked up meanwhile, each fork has."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/version", b"3\n")
    _load(file, True)


def main() -> None:
    """Serve the process that started this one, over the standard input."""
    sys.path.append(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that process
    warnings.simplefilter("ignore")
    _warm_up()
    channel = socket.socket(fileno=0)
    for kind, descriptor, answer in _requests(channel):
        seconds = limits(os.fstat(descriptor).st_size)[1]
        child = os.fork()
        if child == 0:
            try:
                channel.close()
                _read(descriptor, answer, kind == OBJECTS)
                os._exit(0)
            finally:  # whatever was raised: the loop of the parent is not continued here
                os._exit(1)
        os.close(descriptor)
        ended = _ended(os.waitpid(child, 0)[1], seconds)
        with contextlib.suppress(BrokenPipeError), open(answer, "wb") as out:
            out.write(b"\n" + ended.encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
