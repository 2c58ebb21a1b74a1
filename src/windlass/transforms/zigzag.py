"""How the rows of a batch are divided among ranks that train on the same long sequences.

A row is cut into twice as many chunks as there are ranks. Rank r gets the chunks r and 2n - 1 - r: with causal
attention, where late tokens see more keys than early ones, all ranks then compute equally much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Zigzag:
    """The division of rows of one length.

    Raises:
        ConfigError: the length is not such a multiple.
    """

    size: int  # the number of ranks
    length: int  # tokens of a whole row; a multiple of twice `size`, unless `size` is 1

    def __post_init__(self) -> None:
        if self.size > 1 and self.length % (2 * self.size):
            fix = f"must be a multiple of {2 * self.size}, twice the {self.size} ranks: pad the rows"
            raise ConfigError(Problem("Zigzag.length", self.length, fix))

    def stretches(self, rank: int) -> list[range]:
        """The places in a whole row of the tokens of `rank`, as consecutive stretches in the order of its part."""
        # A rank alone has the row as it is, also of a length that is not even.
        if self.size == 1:
            return [range(self.length)]
        chunk = self.length // (2 * self.size)
        return [range(at * chunk, (at + 1) * chunk) for at in (rank, 2 * self.size - 1 - rank)]

    def part(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of `rank`, of a tensor that has the tokens of whole rows along `dim`."""
        stretches = self.stretches(rank)
        return torch.cat([whole.narrow(dim, places.start, len(places)) for places in stretches], dim)

    def whole(self, parts: Tensor, dim: int) -> Tensor:
        """Put the tokens along `dim` in the order of the row; they are the parts of all ranks, one after another."""
        stretches = self._all()
        pieces = torch.split_with_sizes(parts, [len(stretch) for stretch in stretches], dim)
        order = sorted(range(len(stretches)), key=lambda at: stretches[at].start)
        return torch.cat([pieces[at] for at in order], dim)

    def parts(self, whole: Tensor, dim: int) -> Tensor:
        """The inverse of `whole`."""
        return torch.cat([whole.narrow(dim, places.start, len(places)) for places in self._all()], dim)

    def _all(self) -> list[range]:
        return [places for rank in range(self.size) for places in self.stretches(rank)]
