"""Replicated data parallelism: every rank holds the model; the last micro-batch's backward averages gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windlass.config.plan import DistPlan
from windlass.core.rng import preserved_rng


class Replicated(DistributedDataParallel):
    """`DistributedDataParallel` that remembers whether it was called, and lends its module's attributes.

    Hooks written for a bare model read `model.config` or `model.device`; a forward that goes past the wrapper would
    leave gradients unreduced, which `forwards` lets the executor find out.
    """

    forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def replicate(module: nn.Module, device: torch.device, plan: DistPlan) -> Replicated:
    """Wrap `module`, already on `device`, for data parallelism over the default process group."""
    options: dict[str, Any] = {
        "find_unused_parameters": plan.find_unused_parameters,
        "static_graph": plan.static_graph,
        # Gradients as views of the buckets: no copy before the optimizer reads them.
        "gradient_as_bucket_view": True,
    }
    if plan.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = plan.bucket_cap_mb
    if plan.broadcast_buffers is not None:
        options["broadcast_buffers"] = plan.broadcast_buffers
    if device.type not in ("cpu", "mps"):
        options["device_ids"] = [device]
    return Replicated(module, **options)


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around one forward and backward: reduce gradients only in the last micro-batch of an update."""
    if last or not isinstance(model, Replicated):
        return contextlib.nullcontext()
    return model.no_sync()


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers. Collective."""
    if isinstance(model, Replicated):
        for buffer in model.module.buffers():
            torch.distributed.broadcast(buffer.detach(), 0)


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that this rank keeps for itself (`ddp_broadcast_buffers=False`), by name; none where all have rank
    0's, which are saved with the weights.
    """
    if not isinstance(model, Replicated) or model.broadcast_buffers:
        return {}
    return {name: buffer.detach() for name, buffer in model.module.named_buffers()}


@contextlib.contextmanager
def buffers_of_first_rank(model: nn.Module) -> Iterator[None]:
    """Within the body every rank holds rank 0's buffers (running statistics and the like): those that are saved.

    Each rank's own follow its own data until the next forward, so without this an evaluation would be of several
    models, most of them not the one in the checkpoint. Collective.
    """
    buffers = list(model.module.buffers()) if isinstance(model, Replicated) else []
    own = [buffer.detach().clone() for buffer in buffers]
    share_buffers(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in zip(buffers, own, strict=True):
                buffer.copy_(saved)


def settle_buckets(model: Replicated, backward: Callable[[], Tensor], device: torch.device) -> None:
    """Two discarded backwards, so that the buckets are in their final order before the first real one.

    DDP rebuilds its buckets after the first backward, by the order in which gradients arrived. Sums over three or
    more ranks depend on the buckets in the last bit, so a resumed run would differ from one that had its first step
    long ago. Buffers, gradients and random generators are left as they were found.
    """
    buffers = [buffer.detach().clone() for buffer in model.module.buffers()]
    with preserved_rng(device):
        for _ in range(2):
            backward()
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, saved in zip(model.module.buffers(), buffers, strict=True):
            buffer.copy_(saved)
