"""The strategy of a single process."""

from __future__ import annotations

from torch import Tensor

from windlass.transforms.strategy import Strategy


class Alone(Strategy):
    """One process holds the whole model, which is on its device already."""

    def averages(self, parameter: Tensor) -> bool:
        return False
