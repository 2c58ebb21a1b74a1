"""Parameters that another rank holds, in the place where the model has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Absent(nn.Parameter):
    """The shape, dtype and device of a parameter that another rank holds, in the memory of one element.

    It never has a gradient, and writing to it is an error.
    """


def absent_like(parameter: nn.Parameter, device: torch.device) -> Absent:
    """Stand-in for `parameter` on a rank that does not hold it."""
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    return Absent(one.expand(parameter.shape), parameter.requires_grad)


def present(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that this rank holds, or holds a part of."""
    return [parameter for parameter in parameters if not isinstance(parameter, Absent)]
