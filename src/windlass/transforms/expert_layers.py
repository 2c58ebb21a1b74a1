"""Layers of experts that are divided among ranks (GShard, arXiv:2006.16668): each rank holds some of the experts, and
tokens travel to the ranks of their experts and back.

The experts of a layer are parameters whose first dimension counts them. Each rank sends every token to the ranks of its
chosen experts, as many to each as there are, and computes what it received with the layer's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.dist.device_mesh import expert_device_mesh, part_along
from windlass.dist.gang import Gang
from windlass.dist.sharded import Absent, present
from windlass.transforms.expert_plan import chosen_experts
from windlass.transforms.first_rank import FirstRank
from windlass.transforms.linear_exchange import exchange
from windlass.transforms.mixing import mix
from windlass.transforms.tensor_split import mine


class DividedExperts(nn.Module):
    """Some of the experts of a layer, mixed into the class of the layer."""

    undivided: type[nn.Module]  # the class of the layer
    expert_group: Any  # the ranks that have the other experts to which its tokens go
    loss_ranks: Gang  # gradients are averages over their targets
    expert_names: tuple[str, ...]  # the parameters that are divided

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shape (tokens, width), from that, and experts and their weights of shape (tokens, chosen experts)."""
        count, width = chosen.shape[-1], hidden_states.shape[-1]
        route = Routes.of if self.loss_ranks.exists else Routes.even
        parts = [self.get_parameter(name) for name in self.expert_names]
        routes = route(chosen, len(mine(parts[0])), self.expert_group)
        # A token is sent once for each of its experts.
        sent = hidden_states.reshape(-1, width)[routes.order // count]
        received = routes.exchange(sent, back=False)
        zero, *own = _Parts.apply(self.loss_ranks, *map(mine, parts))  # type: ignore[no-untyped-call]
        # Not all forwards of experts can compute no tokens.
        if len(received):
            with computing_with(self, dict(zip(self.expert_names, own, strict=True)), received.dtype):
                made = super().forward(received, routes.experts[:, None], received.new_ones(len(received), 1))
                # Under autocast it may have another dtype, which a rank that received no token does not know.
                made = made.to(received.dtype)
        else:
            # Every rank must take part in the backward of all exchanges, even one that received no token: the zero
            # carries a gradient from the second one to the parameters.
            made = received + zero
        returned = routes.exchange(made, back=True)[routes.order.argsort()]
        weighted = returned.view(-1, count, width) * weights.reshape(-1, count, 1)
        return weighted.sum(1).to(hidden_states.dtype).view_as(hidden_states)


@contextlib.contextmanager
def computing_with(layer: Any, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Within the body, attributes of a layer that are its parameters are this rank's parts of them, and `num_experts`
    counts the experts in these.

    Args:
        parts: by the name of the parameter; the first size of each is the number of experts.
        dtype: of what the layer computes with them; under autocast they stay as they are.
    """
    all_experts, layer.num_experts = layer.num_experts, len(next(iter(parts.values())))
    for name, part in parts.items():
        # Of what a sharded model gathers, it casts by itself.
        own_dtype = torch.is_autocast_enabled(part.device.type)
        vars(layer)[name] = part if own_dtype else part.to(dtype)
    try:
        yield
    finally:
        layer.num_experts = all_experts
        for name in parts:
            del vars(layer)[name]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the tokens of a batch go: each as often as it chose experts."""

    order: Tensor  # the places of what is sent, by expert
    # `sent`, `received`: how many go to each rank, and come from it
    sent: list[int]
    received: list[int]
    experts: Tensor  # of this rank's, that of each token received
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
            # Stable, so that the sums over the tokens of an expert have one order.
            flat.argsort(stable=True),
            sent,
            received,
            own.repeat_interleave(arriving, output_size=sum(received)),
            group,
        )

    @classmethod
    def even(cls, chosen: Tensor, experts: int, group: Any) -> Routes:
        """As `of`, if all experts were chosen equally often: where tokens have no values, nothing else is known."""
        flat, ranks = chosen.reshape(-1), dist.get_world_size(group)
        counts = torch.empty(experts * ranks, dtype=torch.int64, device=flat.device)
        dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
        sent = [len(flat) // ranks + (rank < len(flat) % ranks) for rank in range(ranks)]
        received = [sent[dist.get_rank(group)]] * ranks
        own = torch.arange(experts, device=flat.device).repeat(-(-sum(received) // experts))
        return cls(flat.argsort(stable=True), sent, received, own[: sum(received)], group)

    def exchange(self, rows: Tensor, *, back: bool) -> Tensor:
        """Send rows to the ranks of their experts, or back; their gradients go the other way. Collective."""
        there, again = partial(self._travelled, back=back), partial(self._travelled, back=not back)
        return exchange(rows, there, again)

    def _travelled(self, rows: Tensor, back: bool) -> Tensor:
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found


class _Parts(torch.autograd.Function):
    """Zero, and the parameters of this rank's experts. Their gradients are summed over the ranks with the same experts;
    each has those of all tokens of its expert gang, so that the average is over all ranks of the loss.

    Where no token came, gradients are zero, as one process has them.
    """

    @staticmethod
    def forward(ctx: Any, loss_ranks: Gang, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.loss_ranks, ctx.like = loss_ranks, [part.new_empty(()).expand(part.shape) for part in parts]
        return parts[0].new_zeros(()), *(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        copies, found = ctx.loss_ranks.over("same_experts"), list[Tensor | None]()
        for gradient, like, needed in zip(gradients, ctx.like, ctx.needs_input_grad[1:], strict=True):
            if not needed:
                found.append(None)
                continue
            if gradient is None:
                gradient = torch.zeros_like(like, memory_format=torch.contiguous_format)
            if copies.size > 1:
                gradient = copies.sum_on_device(gradient.clone(memory_format=torch.contiguous_format))
            found.append(gradient / ctx.loss_ranks.size)
        return None, *found


# --- dividing ---------------------------------------------------------------------------------------------------------


def divide_experts(module: nn.Module, first: FirstRank, loss_ranks: Gang, device: torch.device) -> None:
    """Replace the experts of `module` by those of this rank, with rank 0's values. What a rank would have is divided
    once more among its tensor gang, whose tokens `tensor_experts.py` sends to the right ones. Layers of other stages
    are only marked. Collective.

    Raises:
        ConfigError: there are none that can be divided so.
    """
    ranks = loss_ranks.over("expert")
    chosen = chosen_experts(module, ranks.size, loss_ranks.over("tensor").size)
    mesh = expert_device_mesh(loss_ranks.mesh, device)
    for layer, names in chosen.values():
        for name in names:
            if isinstance(layer.get_parameter(name), Absent):
                continue
            first.place([layer.get_parameter(name)])
            layer.register_parameter(name, part_along(layer.get_parameter(name), mesh, 0, "tensor", "expert"))
        kind: Any = type(layer)
        mix(DividedExperts, layer)
        assert isinstance(layer, DividedExperts)
        layer.undivided = kind
        layer.expert_group, layer.loss_ranks, layer.expert_names = ranks.device_group, loss_ranks, names


# --- what the strategies need -----------------------------------------------------------------------------------------


def layers_of(module: nn.Module) -> list[DividedExperts]:
    """The divided layers of experts of a module."""
    return [layer for layer in module.modules() if isinstance(layer, DividedExperts)]


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of which this rank holds its experts."""
    return present(layer.get_parameter(name) for layer in layers_of(module) for name in layer.expert_names)
