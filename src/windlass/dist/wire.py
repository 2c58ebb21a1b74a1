"""What travels between processes: plain values as JSON, tensors and arrays as their bytes. Nothing is ever unpickled.

Values that JSON has are sent as they are. Others are an object with one key that starts with `$`: tuples, sets, paths,
maps whose keys are not strings, and bytes, tensors and arrays, whose content follows the JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import DataError
from windlass.core.tensors import bits_of, dtype_name
from windlass.dist.same_call import in_same_call

CHUNK_BYTES = 16 * 2**20
"""Small tensors are sent together up to this many bytes: few messages, and little memory beyond the result."""

Streamed = tuple[int, int, Tensor]
"""(rank it comes from, its place in that rank's list, the tensor)."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape, by which another process makes room for a tensor."""

_PLAIN = {bool, int, float, str, type(None)}
_ARRAY_KINDS = "biufcSUMm"
# Tensors begin at multiples of this, so that received bytes can be looked at as any dtype.
_ALIGNMENT = 16
# Values of up to so many bytes are sent at once, without an exchange of their lengths.
_SHORT_BYTES = 1024


def pack(value: Any, notes: Any = None, name: str = "value") -> Tensor:
    """A value as one host tensor of bytes (uint8, 1-D): length of the JSON text, the text, contents.

    Args:
        value: numbers, strings, None, bytes, paths, dense tensors (any device), arrays, and nests of them.
        notes: what JSON can carry, to go along.
        name: what errors call the value.

    Raises:
        DataError: names the place in the value, and the type that cannot be sent.
    """
    contents: list[Tensor] = []
    text = json.dumps([notes, _described(value, contents, name)]).encode()
    head = _bytes(len(text).to_bytes(8, "little") + text)
    return torch.cat([piece for part in (head, *contents) for piece in (part, _padding(part.numel()))])


def unpack(parcel: Tensor) -> tuple[Any, Any]:
    """The value and the notes; tensors are views of the parcel. Raises DataError if it is not what `pack` makes."""
    try:
        end = 8 + int.from_bytes(parcel[:8].numpy().tobytes(), "little")
        notes, described = json.loads(parcel[8:end].numpy().tobytes())
        return _Unpacking(parcel, _aligned(end)).value(described), notes
    except Exception as error:  # which types, depends on the place that is damaged
        raise DataError(f"a message of another process is damaged: {error}") from error


def gather(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order. Collective.

    Args:
        value: what `pack` takes; NaN and infinities included.
        group: a process group whose backend carries host tensors (gloo); None is the default group.

    Raises:
        DataError: on all ranks: the value of one of them cannot be sent.
        RankMismatchError: on all ranks: they are in different calls of the script.
    """
    failure: Exception | None = None
    try:
        parcel = pack(value)
    except Exception as error:  # of any kind: raised here, it would leave the other ranks waiting
        failure = error
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        parcel = pack(None, {"error": reason})
    # `all_gather` takes tensors of one length, which is asked for unless all are short.
    longest = _SHORT_BYTES
    if not in_same_call("values", parcel.numel() <= longest, group):
        lengths = torch.tensor(parcel.numel())
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=group)
        longest = int(lengths)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, torch.cat([parcel, parcel.new_zeros(longest - len(parcel))]), group=group)
    answers = [unpack(got) for got in received]
    wrong = [f"process {rank}: {notes['error']}" for rank, (_, notes) in enumerate(answers) if notes]
    if wrong:
        raise DataError(f"this cannot be sent to other processes: {'; '.join(wrong)}") from failure
    return [answer for answer, _ in answers]


def stream(tensors: list[Tensor], group: Any = None, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Streamed]:
    """Every rank's tensors one after another, in rank order, whatever their number, shapes and types. Collective.

    Empties `tensors` as it goes, so that memory is freed while the result grows. Own tensors come back on their own
    device, those of other ranks in host memory. Must be read to the end on all ranks. `chunk_bytes`: upper bound of one
    message, but for a tensor that is larger by itself.
    """
    mine = dist.get_rank(group)
    for rank, header in enumerate(gather([[dtype_name(t.dtype), list(t.shape)] for t in tensors], group)):
        kinds: list[Kind] = [(getattr(torch, name), tuple(shape)) for name, shape in header]
        sizes = [_nbytes(*kind) for kind in kinds]
        for run in _runs(sizes, chunk_bytes):
            if rank == mine:
                parts = [bits_of(tensors[index]).cpu() for index in run]
                buffer = torch.cat(parts) if len(parts) > 1 else parts[0]
            else:
                buffer = torch.empty(sum(sizes[index] for index in run), dtype=torch.uint8)
            if buffer.numel():
                dist.broadcast(buffer, group=group, group_src=rank)
            if rank == mine:
                yield from _let_go(rank, tensors, run)
            else:
                yield from _received(rank, run, kinds, buffer)
    tensors.clear()


def own_stream(tensors: list[Tensor]) -> Iterator[Streamed]:
    """`stream` in a world of one."""
    yield from _let_go(0, tensors, range(len(tensors)))
    tensors.clear()


def _let_go(rank: int, tensors: list[Tensor], run: range) -> Iterator[Streamed]:
    nothing = torch.empty(0)
    for index in run:
        tensor, tensors[index] = tensors[index], nothing
        yield rank, index, tensor


def _received(rank: int, run: range, kinds: Sequence[Kind], buffer: Tensor) -> Iterator[Streamed]:
    parts = torch.split(buffer, [_nbytes(*kinds[index]) for index in run])
    for index, part in zip(run, parts, strict=True):
        dtype, shape = kinds[index]
        # A fresh tensor: a part may start at an address that its type cannot be read from.
        tensor = torch.empty(shape, dtype=dtype)
        bits_of(tensor).copy_(part)
        yield rank, index, tensor


def _runs(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Cut 0..len(sizes) into runs of at most `limit` bytes, or of one item that is larger."""
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and held + size > limit:
            yield range(start, index)
            start, held = index, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))


# --- values as JSON ---------------------------------------------------------------------------------------------------


def _described(value: Any, contents: list[Tensor], where: str) -> Any:
    """A JSON value; contents are appended in the order of their descriptions."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return _items(value, contents, where)
    if isinstance(value, Mapping):
        return _map(value, contents, where)
    if kind in (tuple, torch.Size):
        return {"$tuple": _items(value, contents, where)}
    if isinstance(value, set | frozenset):
        tag = "$set" if isinstance(value, set) else "$frozenset"
        return {tag: _items(list(value), contents, where)}
    if isinstance(value, Path):
        return {"$path": str(value)}
    if isinstance(value, Tensor):
        contents.append(_bits(value, where))
        return {"$tensor": [dtype_name(value.dtype), list(value.shape)]}
    if isinstance(value, np.ndarray | np.generic):
        contents.append(_array(value, where))
        return {"$array": [value.dtype.str, list(value.shape), isinstance(value, np.generic)]}
    if isinstance(value, bytes):
        contents.append(_bytes(value))
        return {"$bytes": len(value)}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):  # a subclass, such as a member of an enumeration
            return plain(value)
    raise DataError(
        f"{where} is a {kind.__name__}, and only plain values travel between processes: numbers, strings, lists, "
        "tuples, sets, dicts, bytes, paths, arrays and tensors; send its fields"
    )


def _items(values: Sequence[Any], contents: list[Tensor], where: str) -> list[Any]:
    if _PLAIN.issuperset(map(type, values)):
        return list(values)
    return [_described(item, contents, f"{where}[{index}]") for index, item in enumerate(values)]


def _map(value: Mapping[Any, Any], contents: list[Tensor], where: str) -> Any:
    def item_of(key: Any) -> Any:
        return _described(value[key], contents, f"{where}[{key!r}]")

    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: item_of(key) for key in value}
    return {"$map": [[_described(key, contents, f"a key of {where}"), item_of(key)] for key in value]}


def _bits(tensor: Tensor, where: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise DataError(f"{where} is a {tensor.layout} tensor; only dense tensors travel between processes")
    return bits_of(tensor.detach().cpu())


def _array(value: Any, where: str) -> Tensor:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise DataError(f"{where} is an array of dtype {value.dtype}, which does not travel; send a list")
    return _bytes(value.tobytes())


class _Unpacking:
    """Builds values out of their descriptions; contents are taken one after another."""

    def __init__(self, parcel: Tensor, start: int) -> None:
        self._parcel, self._at = parcel, start

    def value(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self.value(item) for item in described]
        if not isinstance(described, dict):
            return described
        read = self._READERS.get(next(iter(described), ""))
        if read is None:
            return {key: self.value(item) for key, item in described.items()}
        (content,) = described.values()
        return read(self, content)

    def _take(self, count: int) -> Tensor:
        start, self._at = self._at, _aligned(self._at + count)
        return self._parcel[start : start + count]

    def _tensor(self, kind: tuple[str, list[int]]) -> Tensor:
        dtype, shape = getattr(torch, kind[0]), kind[1]
        return self._take(_nbytes(dtype, tuple(shape))).view(dtype).view(shape)

    def _array(self, kind: tuple[str, list[int], bool]) -> Any:
        dtype, shape, is_scalar = np.dtype(kind[0]), kind[1], kind[2]
        if dtype.kind not in _ARRAY_KINDS:
            # An array of objects would use the bytes as addresses.
            raise ValueError(f"an array of dtype {dtype}")
        content = bytearray(self._take(dtype.itemsize * int(np.prod(shape))).numpy())
        array: Any = np.ndarray(shape, dtype, content)
        return array[()] if is_scalar else array

    _READERS: ClassVar[dict[str, Callable[[_Unpacking, Any], Any]]] = {
        "$tuple": lambda self, items: tuple(self.value(items)),
        "$set": lambda self, items: set(self.value(items)),
        "$frozenset": lambda self, items: frozenset(self.value(items)),
        "$path": lambda self, text: Path(text),
        "$bytes": lambda self, count: self._take(count).numpy().tobytes(),
        "$tensor": _tensor,
        "$array": _array,
        "$map": lambda self, pairs: {self.value(key): self.value(item) for key, item in pairs},
    }


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def _bytes(content: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


def _padding(count: int) -> Tensor:
    return torch.zeros(_aligned(count) - count, dtype=torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
