"""Replicas of which only one exists: what PyTorch's DDP keeps and sends, for tensors that have no memory.

Its reducer is C++ code that reads and writes memory, so it cannot run on such tensors. This one allocates the same
buckets, makes gradients views of them, and reduces each bucket as soon as it is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.config.plan import DistPlan
from windlass.core.attributes import attributes_of
from windlass.dist.gang import Gang
from windlass.transforms.strategy import Strategy

# PyTorch's: of the bucket whose gradients come first, and of all others, if the plan has no other size.
_FIRST_MB, _REST_MB = 1, 25


class ImaginedReplicas(Strategy):
    """Whole parameters, and gradients in buckets.

    Args:
        apart: parameters that are not replicated.
    """

    def __init__(
        self, module: nn.Module, plan: DistPlan, loss_ranks: Gang, apart: Sequence[nn.Parameter] = ()
    ) -> None:
        super().__init__(module)
        self._loss_ranks, self._reducing = loss_ranks, True
        self.buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._missing: list[int] = []
        left_out = set(apart)
        trained = [p for p in module.parameters() if p.requires_grad and p not in left_out]
        limit = (plan.bucket_cap_mb or _REST_MB) * 2**20
        for group in _grouped(list(reversed(trained)), limit):
            self._add_bucket(group)
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in trained]  # type: ignore[no-untyped-call]

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters), requires_grad=False).detach()
        number, offset = len(self.buckets), 0
        for parameter in parameters:
            view = flat[offset : offset + parameter.numel()].view(parameter.shape)
            self._views[parameter] = number, view
            offset += parameter.numel()
        self.buckets.append(flat)
        self._missing.append(len(parameters))

    def micro(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else attributes_of(self, _reducing=False)

    def _arrived(self, parameter: Tensor) -> None:
        if not self._reducing:
            return
        number, view = self._views[parameter]  # type: ignore[index]
        # As DDP does with `gradient_as_bucket_view`: a gradient has no memory beside the bucket.
        parameter.grad = view
        self._missing[number] -= 1
        if not self._missing[number]:
            self._missing[number] = sum(1 for where, _ in self._views.values() if where == number)
            dist.all_reduce(self.buckets[number], group=self._loss_ranks.device_group)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _grouped(parameters: list[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in buckets: a bucket is closed by the gradient with which it reaches its size."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    first = True
    for parameter in parameters:
        kind = parameter.dtype
        found.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= (_FIRST_MB * 2**20 if first else limit):
            yield found.pop(kind)
            sizes[kind], first = 0, False
    yield from found.values()
