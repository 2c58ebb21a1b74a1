"""What strategies have in common whose ranks compute with parts of the parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from windlass.dist.gang import Gang
from windlass.dist.sharded import copies_among, locals_of
from windlass.transforms.strategy import Strategy, device_of, squared_norm, whole_on_main
from windlass.transforms.tensor_layers import undivided


class HeldInParts(Strategy):
    """A model of which each rank has some columns, rows, experts or shards. They stay divided after a run, and a module
    that was divided before is not changed. A subclass sets the ranks that have copies or parts of the same layers.
    """

    sharded = True
    saves_parts = True
    _stage_ranks: Gang

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Count every element once: squares are divided by the number of ranks with a copy."""
        # float64 holds the square of any norm that float32 holds.
        square = torch.zeros((), dtype=torch.float64, device=device_of(self._module))
        for gradient, part in zip(gradients, locals_of(gradients), strict=True):
            square += squared_norm(part).double() / copies_among(gradient, self._stage_ranks.size)
        return self.norm_of(square).to(gradients[0].dtype if gradients else square.dtype)

    def square(self, gradient: Tensor) -> Tensor:
        [mine] = locals_of([gradient])
        return squared_norm(mine) / copies_among(gradient, self._stage_ranks.size)

    def norm_of(self, square: Tensor) -> Tensor:
        return self._stage_ranks.sum_on_device(square).sqrt()

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return locals_of(gradients)

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        return self._stage_ranks.max_on_device(flag)

    def gathered(self) -> AbstractContextManager[None]:
        """Forwards inside do not communicate. Changes to divided parameters are lost."""
        return undivided(self._module)

    def whole_state(self) -> dict[str, Any]:
        """Gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        return whole_on_main(self._module, self._stage_ranks.world.is_main)
