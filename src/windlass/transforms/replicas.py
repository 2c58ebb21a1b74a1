"""Replicas that reduce one gradient at a time, for optimizers that update in the backward.

PyTorch's wrapper (`ddp.py`) reduces gradients in buckets, which hold all of them until the end of the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from windlass.config.plan import DistPlan
from windlass.core.errors import ModelError, refuse
from windlass.core.rng import preserved_rng
from windlass.dist.gang import Gang
from windlass.transforms.buffers import ForwardState, broadcast
from windlass.transforms.strategy import Strategy, device_of, options_of_ddp, unfrozen
from windlass.transforms.wrapping import listed


class Replicas(Strategy):
    """Whole parameters on every rank, gradients that are averaged in the backward, in one order.

    The order is the same on all ranks, so that their exchanges match. It is that in which the first backward reached
    the parameters, or the reverse of the model's if `warm_up` was not called.

    Args:
        module: on its device already. All ranks get rank 0's weights and buffers. Collective.

    Raises:
        ConfigError: the plan has options of PyTorch's wrapper.
    """

    def __init__(self, module: nn.Module, plan: DistPlan, loss_ranks: Gang) -> None:
        super().__init__(module, loss_ranks)
        fix = "the optimizer updates in the backward, where gradients are reduced one at a time; leave it out"
        refuse(options_of_ddp(plan, fix, besides="broadcast_buffers"))
        self._loss_ranks = loss_ranks
        broadcast((tensor.detach() for tensor in (*module.parameters(), *module.buffers())), loss_ranks)
        self._names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self._ready: set[int] = set()
        self._next = 0
        self._recorded: list[nn.Parameter] | None = None
        # Before the first forward of an update, so that between updates rank 0's, which are saved, are all that count.
        self._shares = plan.broadcast_buffers is not False
        self._begins = True  # an update
        self.own.differs = loss_ranks.size > 1 and not self._shares
        self._sharing = False
        self._hook = module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._sharing:
            self.share_buffers()

    @contextlib.contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        self._ready.clear()
        self._next = 0
        # After an error another update begins.
        self._sharing, self._begins = self._shares and self._begins, True
        try:
            yield
            self._begins = last
        finally:
            self._sharing = False

    def reduced(self, parameter: nn.Parameter) -> Iterable[nn.Parameter]:
        if self._recorded is not None:
            self._recorded.append(parameter)
            yield parameter
            return
        if id(parameter) not in self._names:
            raise unfrozen()
        self._ready.add(id(parameter))
        while self._next < len(self._order) and id(self._order[self._next]) in self._ready:
            yield self._reduce_next()

    def _reduce_next(self) -> nn.Parameter:
        parameter = self._order[self._next]
        self._next += 1
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self._loss_ranks.device_group)
        parameter.grad.div_(self._loss_ranks.size)
        return parameter

    def left_over(self) -> Iterable[nn.Parameter]:
        if self._recorded is not None:
            return
        # Reduced all the same, because other ranks wait in these exchanges; the error follows them.
        missing = [p for p in self._order if id(p) not in self._ready]
        while self._next < len(self._order):
            parameter = self._order[self._next]
            if parameter.grad is None:  # other ranks may have reached it, and wait for this one
                parameter.grad = parameter.new_zeros(parameter.shape)
            yield self._reduce_next()
        self._ready.clear()
        self._next = 0
        if missing:
            raise self._unused([self._names[id(p)] for p in missing])

    def _unused(self, names: list[str]) -> ModelError:
        return ModelError(
            f"the loss of some rank does not depend on {len(names)} of {len(self._names)} trained parameters: "
            f"{listed(names, limit=10)}. An optimizer that updates in the backward needs all of their "
            "gradients on every rank. Freeze them (requires_grad_(False)), or use them in the loss"
        )

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run one discarded backward, to find the order of gradients. Buffers, extra states and random generators are
        restored. Collective.
        """
        before = ForwardState(self.module)
        self._recorded = []
        with preserved_rng(device_of(self.module)):
            backward()
        before.restore()
        found, self._recorded = self._recorded, None
        by_name = {self._names[id(p)]: p for p in self._order}
        # Ranks may reach parameters in different orders, and exchanges must match: all take that of rank 0.
        everywhere: list[list[str]] = self._loss_ranks.gather_objects([self._names[id(p)] for p in found])
        missing = [name for name in by_name if any(name not in names for names in everywhere)]
        if missing:
            raise self._unused(missing)
        self._order = [by_name[name] for name in everywhere[0]]

    def _release(self) -> None:
        self._hook.remove()
