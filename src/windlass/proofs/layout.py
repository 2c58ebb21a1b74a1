"""A layout of processes as sizes of named axes, and the smaller layouts that are tried in its place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from windlass.core.errors import Problem, did_you_mean, refuse

_WITH_OWN_SAMPLES = ("dp", "dp_shard", "ep")
AXES = ("dp", "dp_shard", "ep", "tp", "cp", "sp", "pp")
_SPELLINGS = {
    "dp_replicate": "dp",
    "replicate": "dp",
    "replicas": "dp",
    "ddp": "dp",
    "shard": "dp_shard",
    "fsdp": "dp_shard",
    "shards": "dp_shard",
    "context": "cp",
    "sequence": "sp",
    "tensor": "tp",
    "pipeline": "pp",
    "expert": "ep",
}
MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """Sizes of axes, of which those above 1 are in use.

    Attributes:
        sizes: axis -> number of ranks along it, in the order of `AXES`, without those of 1.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> AxisLayout:
        """The layout with these sizes. Axes of 1 are left out."""
        return cls(tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1))

    @classmethod
    def parse(cls, text: str, field: str = "--layout") -> AxisLayout:
        """Read `tp=2,cp=2`. Raises ConfigError with every part that is not an axis and its size."""
        sizes: dict[str, int] = {}
        problems = []
        for part in filter(None, text.replace(",", " ").replace(" x ", " ").split()):
            name, _, size = part.partition("=")
            word = name.strip().removesuffix("_size").replace("-", "_")
            axis = _SPELLINGS.get(word, word)
            if axis not in AXES:
                fix = f"there is no axis {name!r}{did_you_mean(word, (*AXES, *_SPELLINGS))}; axes: {', '.join(AXES)}"
                problems.append(Problem(field, part, fix))
            elif not size.isdecimal() or int(size) < 1:
                problems.append(Problem(field, part, f"write {name}=SIZE, with a size of 1 or more"))
            elif axis in sizes:
                problems.append(Problem(field, part, f"{axis} is set twice; leave one out"))
            else:
                sizes[axis] = int(size)
        refuse(problems)
        return cls.of(sizes)

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.sizes) or "one process"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in use."""
        return tuple(axis for axis, _ in self.sizes)

    def along(self, *axes: str) -> int:
        """The product of the sizes of `axes`."""
        return math.prod(size for axis, size in self.sizes if axis in axes)

    @property
    def processes(self) -> int:
        """How many there are in all."""
        return math.prod(size for _, size in self.sizes)

    @property
    def data_ranks(self) -> int:
        """How many of them have samples of their own."""
        return self.along(*_WITH_OWN_SAMPLES)

    def reduced(self) -> AxisLayout:
        """The layout that is tried in place of this one: this one, if few processes suffice; else axes above 2 have 2
        ranks, so that each axis is still there.
        """
        if self.processes <= MOST_PROCESSES:
            return self
        return AxisLayout(tuple((axis, 2) for axis, _ in self.sizes))

    def parts(self) -> Iterator[AxisLayout]:
        """Every layout of some of the axes, those of fewer axes first, without this one."""
        for count in range(1, len(self.sizes)):
            for chosen in itertools.combinations(self.sizes, count):
                yield AxisLayout(chosen)
