"""Layers of experts that are divided among ranks (GShard, arXiv:2006.16668): each rank holds some of the experts, and
tokens travel to the ranks of their experts and back.

The experts of a layer are parameters whose first dimension counts them. Each rank sends every token to the ranks of its
chosen experts, as many to each as there are, and computes what it received with the layer's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from windlass.dist.device_mesh import expert_device_mesh
from windlass.dist.gang import Gang
from windlass.dist.sharded import local, whole
from windlass.transforms.expert_plan import chosen_experts
from windlass.transforms.first_rank import FirstRank


class DividedExperts(nn.Module):
    """Some of the experts of a layer, mixed into the class of the layer.

    Attributes:
        num_experts: those of this rank.
        all_experts: those of all ranks.
        expert_group: the ranks that have the others.
        expert_names: the parameters that are divided.
        holds_all: every rank has all experts for now, so that tokens stay.
    """

    num_experts: Any
    all_experts: int
    expert_group: Any
    expert_names: tuple[str, ...]
    holds_all = False

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shape (tokens, width), from that, and experts and their weights of shape (tokens, chosen experts)."""
        if self.holds_all:
            whole_result: Tensor = super().forward(hidden_states, chosen, weights)
            return whole_result
        count, width = chosen.shape[-1], hidden_states.shape[-1]
        routes = Routes.of(chosen, self.num_experts, self.expert_group)
        parts = {name: self.get_parameter(name) for name in self.expert_names}
        # Every rank must take part in the backward of both exchanges, even one that received no token.
        trained = hidden_states.requires_grad or any(part.requires_grad for part in parts.values())
        anchor = torch.zeros((), requires_grad=trained and torch.is_grad_enabled())
        sent = hidden_states.reshape(-1, width)[routes.order // count]
        made = received = routes.exchange(sent, anchor, back=False)
        if len(received):
            with self._computing_with(parts, received.dtype):
                made = super().forward(received, routes.experts[:, None], received.new_ones(len(received), 1))
        returned = routes.exchange(made, anchor, back=True)[routes.order.argsort()]
        weighted = returned.view(-1, count, width) * weights.reshape(-1, count, 1)
        return weighted.sum(1).to(hidden_states.dtype).view_as(hidden_states)

    @contextlib.contextmanager
    def _computing_with(self, parts: dict[str, Any], dtype: torch.dtype) -> Iterator[None]:
        """Within the body, the attributes of these parameters are this rank's parts of them."""
        for name, part in parts.items():
            mine = part.to_local()
            # Of what a sharded model gathers, it casts by itself.
            own_dtype = torch.is_autocast_enabled(mine.device.type)
            vars(self)[name] = mine if own_dtype else mine.to(dtype)
        try:
            yield
        finally:
            for name in parts:
                del vars(self)[name]


@cache
def _divided(kind: Any) -> Any:
    return type(f"Divided{kind.__name__}", (DividedExperts, kind), {"__module__": kind.__module__})


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the tokens of a batch go: each as often as it chose experts.

    Attributes:
        order: the places of what is sent, by expert.
        sent, received: how many go to each rank, and come from it.
        experts: of this rank's, that of each token received.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor
    group: Any

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: Any) -> Routes:
        """The routes to the chosen ones of `experts` on each rank of `group`. Collective.

        The host waits for the device once: the exchange needs the numbers of tokens there.
        """
        ranks = dist.get_world_size(group)
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=experts * ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = torch.stack([counts, arriving]).view(2, ranks, experts).sum(-1).tolist()
        own = torch.arange(experts, device=flat.device).repeat(ranks)
        return cls(
            flat.argsort(stable=True),
            sent,
            received,
            own.repeat_interleave(arriving, output_size=sum(received)),
            group,
        )

    def exchange(self, rows: Tensor, anchor: Tensor, *, back: bool) -> Tensor:
        """Send rows to the ranks of their experts, or back. Collective, as is the backward if `anchor` needs one."""
        sizes = (self.received, self.sent) if back else (self.sent, self.received)
        found: Tensor = _Travel.apply(rows, anchor, *sizes, self.group)  # type: ignore[no-untyped-call]
        return found


class _Travel(torch.autograd.Function):
    """Rows go to other ranks, and their gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, sent: list[int], received: list[int], group: Any
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


# --- dividing ---------------------------------------------------------------------------------------------------------


def divide_experts(module: nn.Module, first: FirstRank, loss_ranks: Gang, device: torch.device) -> None:
    """Replace the experts of `module` by those of this rank, with rank 0's values. Collective.

    Raises:
        ConfigError: there are none that can be divided so.
    """
    ranks = loss_ranks.over("expert")
    chosen = chosen_experts(module, ranks.size)
    mesh = expert_device_mesh(loss_ranks.mesh, device)
    for layer, names in chosen.values():
        for name in names:
            first.place([layer.get_parameter(name)])
            whole_one = layer.get_parameter(name)
            mine = (
                whole_one.detach().chunk(ranks.size)[ranks.rank].clone(memory_format=torch.contiguous_format)
            )
            placements = [Shard(0) if axis == "expert" else Replicate() for axis in mesh.mesh_dim_names or ()]
            part = DTensor.from_local(
                mine, mesh, placements, run_check=False, shape=whole_one.shape, stride=whole_one.stride()
            )
            layer.register_parameter(name, nn.Parameter(part, whole_one.requires_grad))
        kind: Any = type(layer)
        layer.__class__ = _divided(kind)
        assert isinstance(layer, DividedExperts)
        layer.all_experts = layer.num_experts
        layer.num_experts //= ranks.size
        layer.expert_group, layer.expert_names = ranks.device_group, names


# --- what the strategies need -----------------------------------------------------------------------------------------


class ExpertLayers:
    """The divided layers of a module.

    Args:
        module: after `divide_experts`.
        loss_ranks: gradients are averages over their targets.
    """

    def __init__(self, module: nn.Module, loss_ranks: Gang) -> None:
        self._layers = layers_of(module)
        self._ranks = loss_ranks.over("expert").size
        self._loss_ranks, self._copies = loss_ranks, loss_ranks.over("same_experts")
        self._trained = [p for p in expert_parameters(module) if p.requires_grad]

    def reduce(self) -> None:
        """Sum gradients over the ranks with the same experts. Each has those of all tokens of its expert gang, so that
        the average is over all ranks. A gradient that is there on any rank is zero where no token came.
        """
        if not self._trained:
            return
        reached = [p.grad is not None for p in self._trained]
        somewhere = torch.tensor(reached, dtype=torch.float32, device=local(self._trained[0].detach()).device)
        self._loss_ranks.sum_on_device(somewhere)
        if not all(reached):
            for parameter, ranks in zip(self._trained, somewhere.tolist(), strict=True):
                if parameter.grad is None and ranks:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter in self._trained:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                if self._copies.size > 1:
                    self._copies.sum_on_device(gradient)
                gradient.div_(self._loss_ranks.size)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which every rank has all experts, and tokens do not travel. Collective."""
        kept = [{name: layer.get_parameter(name) for name in layer.expert_names} for layer in self._layers]
        for layer, parts in zip(self._layers, kept, strict=True):
            for name, part in parts.items():
                layer.register_parameter(name, nn.Parameter(whole(part), requires_grad=False))
            layer.num_experts, layer.holds_all = layer.all_experts, True
        try:
            yield
        finally:
            for layer, parts in zip(self._layers, kept, strict=True):
                for name, part in parts.items():
                    layer.register_parameter(name, part)
                layer.num_experts, layer.holds_all = layer.all_experts // self._ranks, False


def layers_of(module: nn.Module) -> list[DividedExperts]:
    """The divided layers of experts of a module."""
    return [layer for layer in module.modules() if isinstance(layer, DividedExperts)]


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of which this rank holds its experts."""
    return [layer.get_parameter(name) for layer in layers_of(module) for name in layer.expert_names]
