"""The axes along which the ranks of a job are laid out, as plain numbers.

On the ground floor for the same reason as `world.py`: configuration checks the sizes of axes, process groups are made
from them, and neither may import the other.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from windlass.core.errors import ConfigError, Problem, refuse

Axis = Literal["pipeline", "replicate", "shard", "expert", "context", "sequence", "tensor"]
View = Literal[
    "data",
    "loss",
    "expert",
    "same_experts",
    "context",
    "ring",
    "heads",
    "tensor",
    "pipeline",
    "model",
    "stage",
    "all",
]

# Outermost first: consecutive ranks differ along the last axis, because consecutive ranks are usually on one machine,
# and the later axes exchange more.
AXES: tuple[Axis, ...] = get_args(Axis)
VIEWS: dict[View, tuple[Axis, ...]] = {
    "data": ("replicate", "shard", "expert"),
    "loss": ("replicate", "shard", "expert", "context", "sequence"),
    "expert": ("expert",),
    "same_experts": ("replicate", "shard", "context", "sequence"),
    "context": ("context", "sequence"),
    "ring": ("context",),
    "heads": ("sequence",),
    "tensor": ("tensor",),
    "pipeline": ("pipeline",),
    "model": ("pipeline", "context", "sequence", "tensor"),
    "stage": ("replicate", "shard", "expert", "context", "sequence", "tensor"),
    "all": AXES,
}
"""The axes of each view. A view of a rank is the ranks that differ from it along these axes alone.

data: ranks with different samples, whose counts and losses are summed. loss: ranks with different targets, whose
gradients are averaged. expert: ranks among which the experts of a mixture are divided. same_experts: ranks of `loss`
that hold the same experts. context: ranks that divide the sequences of the same samples. ring, heads: those of them
among which keys travel, and those that exchange heads. tensor: ranks that divide the layers of one model. pipeline:
ranks that each compute some of its layers. model: ranks that compute the same samples together. stage: ranks that have
copies or parts of the same layers. all: every rank of the job.
"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of ranks along each axis; their product is the number of ranks.

    Raises:
        ConfigError: a size is below 1.
    """

    replicate: int = 1  # copies of the model, which train on different samples
    shard: int = 1  # ranks that each store a part of one copy, and train on different samples too
    # Ranks that each have a part of the sequences of the same samples, among which keys travel
    context: int = 1
    sequence: int = 1  # ranks that divide such a part once more, and exchange heads
    tensor: int = 1  # ranks that each compute with a part of every weight, on the same samples
    pipeline: int = 1  # ranks that each compute some of the layers, on the same samples
    # Ranks among which the experts of a mixture are divided, and which train on different samples. Of all other
    # weights each has a copy, or a part if the model is sharded.
    expert: int = 1

    def __post_init__(self) -> None:
        refuse(
            Problem(f"Mesh.{name}", size, "must be at least 1")
            for name, size in asdict(self).items()
            if size < 1
        )

    def along(self, axis: Axis) -> int:
        """The number of ranks along `axis`."""
        return int(getattr(self, axis))

    def used(self) -> dict[Axis, int]:
        """The sizes of the axes that have several ranks."""
        return {axis: size for axis in AXES if (size := self.along(axis)) > 1}

    def size(self, view: View = "all") -> int:
        """The number of ranks in each gang of `view`. Raises ConfigError if there is no such view."""
        return math.prod(self.along(axis) for axis in _axes_of(view))

    def index(self, axis: Axis, rank: int) -> int:
        inner = AXES[AXES.index(axis) + 1 :]
        return rank // math.prod(map(self.along, inner)) % self.along(axis)

    def ranks(self, view: View, rank: int) -> tuple[int, ...]:
        """The ranks in the `view` of `rank`, itself included, in ascending order."""
        varied = _axes_of(view)
        positions = [range(self.along(axis)) if axis in varied else [self.index(axis, rank)] for axis in AXES]
        return tuple(map(self._rank_at, itertools.product(*positions)))

    def parts(self, view: View) -> list[tuple[int, ...]]:
        """The gangs into which `view` divides the job: the same list on every rank."""
        varied = _axes_of(view)
        firsts = itertools.product(*([0] if axis in varied else range(self.along(axis)) for axis in AXES))
        return [self.ranks(view, self._rank_at(first)) for first in firsts]

    def place(self, rank: int) -> str:
        """The position of `rank` along each axis, as text; empty if ranks only have different samples."""
        if self.size("model") == self.expert == 1:
            return ""
        return ", ".join(f"{axis} {self.index(axis, rank)}" for axis in self.used())

    def with_replicas(self, replicas: int) -> Mesh:
        """The same ranks, with those of `data` divided into so many copies of the model. Views do not change.

        Raises:
            ConfigError: they do not divide into so many, or the ranks of a copy not among the experts.
        """
        ranks = self.size("data")
        if replicas < 1 or ranks % (replicas * self.expert):
            each = f", {self.expert} to the experts of each copy" if self.expert > 1 else ""
            fix = f"must divide the number of processes, {ranks}{each}"
            raise ConfigError(Problem("dp_replicate_size", replicas, fix))
        return replace(self, replicate=replicas, shard=ranks // (replicas * self.expert))

    def _rank_at(self, positions: tuple[int, ...]) -> int:
        rank = 0
        for axis, position in zip(AXES, positions, strict=True):
            rank = rank * self.along(axis) + position
        return rank


def _axes_of(view: View) -> tuple[Axis, ...]:
    if view not in VIEWS:
        raise ConfigError(Problem("view", view, f"must be one of {', '.join(VIEWS)}"))
    return VIEWS[view]
