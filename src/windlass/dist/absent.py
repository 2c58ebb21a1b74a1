"""Parameters that another rank holds, in the place where the model has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.dist.flat import FlatParts


class Absent(nn.Parameter):
    """The shape, dtype and device of a parameter that another rank holds, in the memory of one element.

    It never has a gradient, and writing to it is an error.
    """


def absent_like(parameter: nn.Parameter, device: torch.device) -> Absent:
    """Stand-in for `parameter` on a rank that does not hold it."""
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    return Absent(one.expand(parameter.shape), parameter.requires_grad)


class Held(FlatParts):
    """A whole tensor that one rank of the job holds, as a tensor that ranks hold in parts: that rank writes it, and
    each rank reads what is in `mine`.
    """

    def whole(self) -> Tensor:
        """The tensor, on every rank. Collective."""
        [(rank, _, count)] = self.pieces or ((0, 0, 0),)
        flat = self.mine if self.mine.numel() == count else self.mine.new_empty(count)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(flat, rank)
        return flat.view(self.shape)


def held(tensor: Tensor, rank: int, present: bool) -> Held:
    """`tensor` as `rank` of the job holds it; `present`: this rank has its values too.

    Its memory is that of `tensor`, unless that is not contiguous: then it is a copy.
    """
    count = tensor.numel()
    flat = tensor.detach().reshape(-1) if present else tensor.new_empty(0)
    made = Held(tensor.shape, flat, 0, [(rank, 0, count)] if count else [])
    assert isinstance(made, Held)
    return made
