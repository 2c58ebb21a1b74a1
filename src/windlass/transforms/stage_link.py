"""How the ranks of a pipeline send activations to each other, whose shapes only the sender knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 10  # dtype, axes, and up to eight sizes
_TAG = 1  # of headers; torch's schedules send tensors with 0
_FAILED = -1


class StageLink:
    """Messages between the ranks of a pipeline, by their index in it.

    A header of few numbers, which travels over the host, precedes each activation: rows may differ in length from one
    micro-batch to the next, and no shape is inferred.

    To make one is collective.

    Args:
        pipeline_ranks: those of the pipeline.

    Attributes:
        borders: the unit with which each stage but the last ends.
        arriving: if the other ranks are imagined, what each module of the model returns, by name.
    """

    def __init__(self, pipeline_ranks: Gang, device: torch.device) -> None:
        self.ranks, self.device = pipeline_ranks, device
        self._under_way: list[tuple[Any, Tensor]] = []
        self.borders: Sequence[str] = ()
        self.arriving: Mapping[str, Tensor] = {}
        if device.type != "cpu" and pipeline_ranks.exists:
            # NCCL connects all ranks of a group in its first call, which must not be a message between two of them.
            pipeline_ranks.sum_on_device(torch.zeros((), device=device))

    def announce(self, tensor: Tensor | None, to: int) -> None:
        """Send the header of a tensor that follows; None: this stage failed, and nothing follows."""
        numbers = [_FAILED] if tensor is None else self._described(tensor)
        # Of one length, because a rank that waits for it knows nothing yet.
        header = torch.tensor([*numbers, *[0] * (_HEADER - len(numbers))])
        work = dist.isend(header, self.ranks.members[to], self.ranks.host_group, _TAG)
        self._under_way.append((work, header))

    def expect(self, source: int) -> Tensor | None:
        """Memory for the tensor that is announced next; None if its stage failed. Waits for the header."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(header, self.ranks.members[source], self.ranks.host_group, _TAG)
        kind, axes, *sizes = header.tolist()
        return None if kind == _FAILED else torch.empty(sizes[:axes], dtype=_DTYPES[kind], device=self.device)

    def imagine(self, stage: int) -> Tensor:
        """Memory for what `stage` begins with, which an imagined rank would send."""
        whole, parts = self.arriving[self.borders[stage - 1]], self.ranks.over("context").size
        if parts == 1:
            return torch.empty_like(whole).detach()
        rows, tokens, width = whole.shape
        return whole.new_empty(rows, -(-tokens // (2 * parts)) * 2, width)

    def sending(self, tensor: Tensor, to: int) -> dist.P2POp:
        """The operation that sends a tensor."""
        return dist.P2POp(dist.isend, tensor, self.ranks.members[to], self.ranks.device_group)

    def receiving(self, tensor: Tensor, source: int) -> dist.P2POp:
        """The operation that receives a tensor into memory."""
        return dist.P2POp(dist.irecv, tensor, self.ranks.members[source], self.ranks.device_group)

    def run(self, *operations: dist.P2POp) -> None:
        """Start operations together, and wait for them."""
        for work in dist.batch_isend_irecv(list(operations)) if operations else ():
            work.wait()

    def send(self, tensor: Tensor | None, to: int) -> None:
        """Announce a tensor and start to send it; `settle` waits for that. None: this stage failed."""
        self.announce(tensor, to)
        if tensor is not None:
            operation = self.sending(tensor.contiguous(), to)
            self._under_way += [(work, operation.tensor) for work in dist.batch_isend_irecv([operation])]

    def receive(self, source: int) -> Tensor | None:
        """What `send` sends."""
        room = self.expect(source)
        if room is not None:
            self.run(self.receiving(room, source))
        return room

    def settle(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._under_way.pop()[0].wait()

    def _described(self, tensor: Tensor) -> list[int]:
        if tensor.dtype not in _DTYPES or tensor.dim() > _HEADER - 2:
            raise ModelError(
                f"a stage of the pipeline ends with a tensor of type {tensor.dtype} and shape {list(tensor.shape)}, "
                "and only floating-point ones of up to 8 axes are sent on: name other modules in pp_split_points"
            )
        return [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
