"""What strategies have in common whose ranks compute with parts of the parameters."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import Gang
from windlass.dist.sharded import copies_among, is_sharded, locals_of
from windlass.transforms.strategy import Strategy, device_of, squared_norm, whole_on_main
from windlass.transforms.tensor_layers import undivided


class HeldInParts(Strategy):
    """A model of which each rank has some columns, rows, experts or shards. They stay divided after a run, and a module
    that was divided before is not changed. A subclass sets the ranks that have copies or parts of the same layers.
    """

    sharded = True
    saves_parts = True
    _stage_ranks: Gang

    @cached_property
    def _copies(self) -> dict[Any, int]:
        """How many ranks hold each element of a tensor, by its layout."""
        return {}

    def _copies_of(self, gradient: Tensor) -> int:
        layout = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        if layout not in self._copies:
            self._copies[layout] = copies_among(gradient, self._stage_ranks.size)
        return self._copies[layout]

    @property
    def _norm_device(self) -> torch.device:
        """The device on which the squares of norms are added up."""
        return device_of(self.module)

    def _sum_of_norm(self, square: Tensor) -> Tensor:
        """The sum over ranks."""
        return self._stage_ranks.sum_on_device(square)

    def _max_of_norm(self, value: Tensor) -> Tensor:
        """The largest value of any rank."""
        return self._stage_ranks.max_on_device(value)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Count every element once: squares are divided by the number of ranks with a copy."""
        # By where they lie, too: what is not sharded stays on the device when the rest is kept on the host.
        groups: dict[tuple[int, torch.device], list[Tensor]] = {}
        for gradient, part in zip(gradients, locals_of(gradients), strict=True):
            groups.setdefault((self._copies_of(gradient), part.device), []).append(part)
        # A rank without gradients adds zero, and takes part in the reduction. float64 holds the square of any norm that
        # float32 holds.
        total = torch.zeros((), dtype=torch.float64, device=self._norm_device)
        for (count, _), parts in groups.items():
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
            total += (norm.double().square() / count).to(total.device)
        return self._sum_of_norm(total).sqrt().to(self._norm_dtype)

    def norm_of_order(self, gradients: list[Tensor], order: float) -> Tensor:
        """Raises ConfigError for order 0, the number of tensors that are not all zero, which ranks with parts of them
        cannot add up.
        """
        if order == 0:
            fix = "is not computed of a model that is divided over ranks; set another order, such as 2"
            raise ConfigError(Problem("norm_type", order, fix))
        extreme, sign = math.isinf(order), math.copysign(1.0, order)
        # The smallest magnitude is found as the largest negative one.
        total = torch.zeros((), dtype=torch.float64, device=self._norm_device)
        total += -torch.inf if order == -torch.inf else 0.0
        for gradient, part in zip(gradients, locals_of(gradients), strict=True):
            # A rank may have no rows of a parameter, of which none is the largest.
            if not part.numel():
                continue
            norm = torch.linalg.vector_norm(part, order).to(total)
            if extreme:
                # A maximum over ranks may lose a NaN.
                total = torch.maximum(total, (sign * norm).nan_to_num(nan=torch.inf, neginf=-torch.inf))
            else:
                total += norm**order / self._copies_of(gradient)
        if extreme:
            return (sign * self._max_of_norm(total)).to(self._norm_dtype)
        return (self._sum_of_norm(total) ** (1 / order)).to(self._norm_dtype)

    def square(self, gradient: Tensor) -> Tensor:
        [mine] = locals_of([gradient])
        return squared_norm(mine) / self._copies_of(gradient)

    def norm_of(self, square: Tensor) -> Tensor:
        return self._sum_of_norm(square.double().to(self._norm_device)).sqrt().to(square.dtype)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return locals_of(gradients)

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        return self._stage_ranks.max_on_device(flag)

    def gathered(self) -> AbstractContextManager[None]:
        """Forwards inside do not communicate. Changes to divided parameters are lost."""
        return undivided(self.module)

    def whole_state(self) -> dict[str, Any]:
        """Gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        return whole_on_main(self.module, self._stage_ranks.world.is_main)
