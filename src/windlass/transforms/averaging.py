"""Averages of gradients over ranks, in one exchange, at the end of a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.attributes import attributes_of
from windlass.core.errors import ModelError
from windlass.dist.sharded import local


def average_gradients(
    parameters: Sequence[nn.Parameter], total: Callable[[Tensor], Tensor], count: int
) -> None:
    """Average the gradients of parameters, or of this rank's parts of them, over `count` ranks. One exchange for each
    dtype.

    Those that no rank has stay None. `total` sums a tensor over the ranks, in place.

    Raises:
        ModelError: some ranks have a gradient of a parameter, and others do not.
    """
    # Not a set, whose order may differ between ranks: their exchanges would not match.
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members = [p for p in parameters if p.dtype == dtype]
        parts = [torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad) for p in members]
        # Ranks say in the same exchange which gradients they have: a zero may be one.
        present = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=parts[0].device)
        flat = torch.cat([present, *(part.flatten() for part in parts)])
        total(flat)
        missing = torch.tensor([p.grad is None for p in members])
        if missing.any() and flat[: len(members)].cpu()[missing].any():
            raise ModelError(
                "the loss of some ranks depends on a parameter that that of others does not reach: use all trained "
                "parameters in the loss on every rank, or freeze it"
            )
        start = len(members)
        for parameter, part in zip(members, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(flat[start : start + part.numel()].view_as(part) / count)
            start += part.numel()


class AfterBackward:
    """Calls a function at the end of each backward that accumulated into a gradient of `parameters`.

    It is part of the backward, so that clipping and an update may follow at once, in any loop. Of several backwards
    each one calls it; so do the inner ones of a recomputation with `use_reentrant=True`: an average that is taken
    again with what was added since is right. A backward that reaches none of `parameters` on one rank must reach none
    on the others, if the function is collective.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reduce: Callable[[], None]) -> None:
        self._reduce, self._held, self._backward = reduce, False, -1
        self._hooks = [self._hooked(p) for p in parameters]

    def _hooked(self, parameter: nn.Parameter) -> Any:
        trained = parameter.requires_grad  # one that is frozen may be trained later
        parameter.requires_grad_(True)
        hook = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)
        return hook

    def held(self, yes: bool = True) -> AbstractContextManager[None]:
        """Context in which backwards only accumulate, if `yes`."""
        return attributes_of(self, _held=self._held or yes)

    def _arrived(self, parameter: Tensor) -> None:
        # By the number of the backward: one that failed has called nothing, and must not keep the next from it.
        backward = torch._C._current_graph_task_id()
        if not self._held and backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        self._reduce()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
