"""What evaluation needs of the other ranks, as a small protocol: a world of one is the normal case.

Nothing is pickled: small things travel as JSON, tensors as their bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import WindlassError
from windlass.dist.exchange import gather_json

CHUNK_BYTES = 16 * 2**20
"""Small tensors are sent together up to this many bytes: few messages, and little memory beyond the result."""

Streamed = tuple[int, int, Tensor]
"""(rank it comes from, its place in that rank's list, the tensor)."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""What must be known of a tensor to receive it: type and shape."""


class PeerError(WindlassError):
    """Another rank failed, so the work they share cannot be finished here."""


class EvalGroup(Protocol):
    """The ranks that evaluate together. Every method is collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. `value` is what JSON can carry (NaN and infinities included)."""
        ...

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        """Every rank's tensors one after another, in rank order, whatever their number, shapes and types.

        Empties `tensors` as it goes, so that memory is freed while the result grows. Own tensors come back on their own
        device, those of other ranks in host memory. Must be read to the end on all ranks.
        """
        ...


class SoloGroup:
    """A world of one: everything is here already."""

    rank = 0
    size = 1

    def gather_json(self, value: Any) -> list[Any]:
        return [value]

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        return _drain(0, tensors)


def _drain(rank: int, tensors: list[Tensor]) -> Iterator[Streamed]:
    nothing = torch.empty(0)
    for index, tensor in enumerate(tensors):
        tensors[index] = nothing
        yield rank, index, tensor
    tensors.clear()


class ProcessGroupGather:
    """Ranks of a `torch.distributed` process group whose backend carries host tensors (gloo).

    Args:
        group: the process group; None is the default group.
        chunk_bytes: upper bound of one message, but for a tensor that is larger by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._group = group
        self._chunk_bytes = chunk_bytes
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather_json(self, value: Any) -> list[Any]:
        return gather_json(value, self._group)

    def stream(self, tensors: list[Tensor]) -> Iterator[Streamed]:
        headers = self.gather_json([[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors])
        for rank, header in enumerate(headers):
            kinds = [(getattr(torch, name), tuple(shape)) for name, shape in header]
            for run in _runs([_nbytes(*kind) for kind in kinds], self._chunk_bytes):
                if rank == self.rank:
                    yield from self._send(run, tensors)
                else:
                    yield from self._receive(rank, run, kinds)
        tensors.clear()

    def _send(self, run: range, tensors: list[Tensor]) -> Iterator[Streamed]:
        parts = [tensors[index].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for index in run]
        self._broadcast(torch.cat(parts) if len(parts) > 1 else parts[0], self.rank)
        nothing = torch.empty(0)
        for index in run:
            tensor, tensors[index] = tensors[index], nothing
            yield self.rank, index, tensor

    def _receive(self, rank: int, run: range, kinds: Sequence[Kind]) -> Iterator[Streamed]:
        sizes = [_nbytes(*kinds[index]) for index in run]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self._broadcast(buffer, rank)
        for index, part in zip(run, torch.split(buffer, sizes), strict=True):
            dtype, shape = kinds[index]
            # A fresh tensor: a part may start at an address that its type cannot be read from.
            tensor = torch.empty(shape, dtype=dtype)
            tensor.reshape(-1).view(torch.uint8).copy_(part)
            yield rank, index, tensor

    def _broadcast(self, buffer: Tensor, source: int) -> None:
        if buffer.numel():
            dist.broadcast(buffer, group=self._group, group_src=source)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


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


_FAILED = "failed"


def agree(group: EvalGroup, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's message; the meeting point at which a rank learns that another one failed.

    Raises:
        PeerError: another rank failed in `telling_others` instead; its words are quoted.
    """
    messages: list[dict[str, Any]] = group.gather_json(message)
    failures = [f"rank {rank}: {m[_FAILED]}" for rank, m in enumerate(messages) if _FAILED in m]
    if failures:
        raise PeerError("evaluation stopped here because it failed elsewhere: " + "; ".join(failures))
    return messages


@contextlib.contextmanager
def telling_others(group: EvalGroup) -> Iterator[None]:
    """Around work that may fail on one rank alone, and is followed by `agree`.

    The ranks that wait there stop with this one's reason, instead of waiting for their time-out.
    """
    try:
        yield
    except PeerError:
        raise  # the others know already, and have left
    except Exception as error:
        with contextlib.suppress(Exception):  # the failure to be told of matters more than the telling
            group.gather_json({_FAILED: f"{type(error).__name__}: {error}"})
        raise
