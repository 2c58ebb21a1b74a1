"""Layers of experts of which each rank of a tensor gang holds some: every rank has all tokens, computes those of its
experts, and the results are summed.

Unlike those of `expert_layers.py` the ranks have the same tokens, and none travels between them. If other ranks divide
what each of them has once more, a token travels there from the one rank of the gang that has its expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.dist.device_mesh import part_along
from windlass.dist.gang import Gang
from windlass.transforms.expert_layers import DividedExperts, computing_with
from windlass.transforms.mixing import mix
from windlass.transforms.tensor_split import TensorSplit, copied, mine, summed


class SomeExperts(nn.Module):
    """Some of the experts of a layer, mixed into the class of the layer.

    Attributes:
        split: which experts this rank has, perhaps with those that divide them once more (`DividedExperts`).
        imagined: the other ranks do not exist, so that tokens have no values: experts are chosen equally often.
    """

    split: TensorSplit
    imagined: bool

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shape (tokens, width) on every rank, from that, and experts and their weights, (tokens, chosen experts)."""
        count, width = chosen.shape[-1], hidden_states.shape[-1]
        states = copied(hidden_states, self.split).reshape(-1, width)
        shares = copied(weights, self.split).reshape(-1)
        here, places = self.split.located(chosen.reshape(-1))
        if self.imagined:
            places_here = torch.arange(-(-len(here) // self.split.ranks), device=here.device)
        else:
            places_here = here.nonzero().flatten()
        made = self._computed(states[places_here // count], places[places_here, None])
        of_choices = states.new_zeros(len(shares), width).index_copy(
            0, places_here, (made * shares[places_here, None]).to(states.dtype)
        )
        total = summed(of_choices.view(-1, count, width).sum(1), self.split)
        return total.to(hidden_states.dtype).view_as(hidden_states)

    def _computed(self, tokens: Tensor, places: Tensor) -> Tensor:
        """What the experts at `places` make of `tokens`, one for each."""
        ones = tokens.new_ones(len(tokens), 1)
        if isinstance(self, DividedExperts):  # which sends them on, and takes part in it without a token too
            divided: Tensor = super().forward(tokens, places, ones)
            return divided
        parts = {name: mine(parameter) for name, parameter in self.named_parameters(recurse=False)}
        if not len(tokens):  # gradients of experts without a token are 0, as one process has them
            return tokens + torch.cat([part.flatten()[:0] for part in parts.values()]).sum().to(tokens.dtype)
        with computing_with(self, parts, tokens.dtype):
            made: Tensor = super().forward(tokens, places, ones)
        return made


def divide_experts(layer: Any, mesh: DeviceMesh, tensor_ranks: Gang) -> None:
    """Replace the experts of a layer by those of this rank, unless that was done for further ranks that divide them.

    Args:
        mesh: along its axis "tensor" ranks have different parts, along others the same.
    """
    if not isinstance(layer, DividedExperts):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(name, part_along(parameter, mesh, 0, "tensor"))
        layer.undivided = type(layer)
    layer.split = TensorSplit(
        layer.num_experts, tensor_ranks.size, tensor_ranks.rank, tensor_ranks.device_group
    )
    layer.imagined = not tensor_ranks.exists
    mix(SomeExperts, layer)
