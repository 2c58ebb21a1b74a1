"""Layers of experts of which each rank of a tensor gang holds some: every rank has all tokens, computes those of its
experts, and the results are summed.

Unlike `expert_layers.py` no token travels, and the ranks have the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.dist.device_mesh import part_along_last
from windlass.dist.gang import Gang
from windlass.transforms.expert_parts import computing_with
from windlass.transforms.tensor_split import TensorSplit, copied, mine, summed


class SomeExperts(nn.Module):
    """Some of the experts of a layer, mixed into the class of the layer.

    Attributes:
        num_experts: of all ranks; while the layer computes, those of this rank.
        split: which experts this rank has.
    """

    num_experts: int
    split: TensorSplit

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shape (tokens, width) on every rank, from that, and experts and their weights, (tokens, chosen experts)."""
        count, width = chosen.shape[-1], hidden_states.shape[-1]
        states = copied(hidden_states, self.split).reshape(-1, width)
        shares = copied(weights, self.split).reshape(-1)
        here, places = self.split.located(chosen.reshape(-1))
        places_here = here.nonzero().flatten()
        own = states[places_here // count]
        parts = {name: mine(parameter) for name, parameter in self.named_parameters(recurse=False)}
        if len(own):
            with computing_with(self, parts, own.dtype), self._counting_own():
                made = super().forward(own, places[places_here, None], own.new_ones(len(own), 1))
        else:  # gradients of experts without a token are 0, as one process has them
            made = own + torch.cat([part.flatten()[:0] for part in parts.values()]).sum().to(own.dtype)
        of_choices = states.new_zeros(len(shares), width).index_copy(
            0, places_here, (made * shares[places_here, None]).to(states.dtype)
        )
        total = summed(of_choices.view(-1, count, width).sum(1), self.split)
        return total.to(hidden_states.dtype).view_as(hidden_states)

    @contextlib.contextmanager
    def _counting_own(self) -> Iterator[None]:
        total, self.num_experts = self.num_experts, len(self.split.mine)
        try:
            yield
        finally:
            self.num_experts = total


@cache
def _of_some(kind: Any) -> Any:
    return type(kind.__name__, (SomeExperts, kind), {"__module__": kind.__module__})


def divide_experts(layer: Any, mesh: DeviceMesh, tensor_ranks: Gang) -> None:
    """Replace the experts of a layer by those of this rank.

    Args:
        mesh: its last axis is that of the tensor gang; along the others ranks have the same parts.
    """
    for name, parameter in list(layer.named_parameters(recurse=False)):
        layer.register_parameter(name, part_along_last(parameter, mesh, 0))
    layer.split = TensorSplit(
        layer.num_experts, tensor_ranks.size, tensor_ranks.rank, tensor_ranks.device_group
    )
    kind: Any = type(layer)
    layer.undivided, layer.__class__ = kind, _of_some(kind)
