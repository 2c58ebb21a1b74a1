"""Layouts for a number of devices, in the order in which they cost: the first that fits is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from windlass.core.errors import ConfigError, Problem
from windlass.dist.imagined import MACHINE

_FORM = re.compile(r"(\d+)x(\d+)GB", re.IGNORECASE)
_USED = 0.9
"""The share of a device's memory that tensors may take: the runtime and the allocator need some, too."""
_RECOMPUTED = "training.activation_checkpointing=true"


class Devices(NamedTuple):
    """So many devices, each with so many bytes."""

    number: int
    memory: int

    @classmethod
    def read(cls, text: str) -> Devices:
        """Read "8x80GB". Raises ConfigError for any other form."""
        found = _FORM.fullmatch(text.strip())
        if found is None or int(found[1]) < 1 or int(found[2]) < 1:
            fix = "is written as the number of devices and the memory of each, such as 8x80GB"
            raise ConfigError(Problem("--fit", text, fix))
        return cls(int(found[1]), int(found[2]) * 10**9)

    @property
    def room(self) -> int:
        """Bytes of a device that tensors may take."""
        return int(self.memory * _USED)


class Layout(NamedTuple):
    """A way to spread a run: its name, and the overrides of a recipe that ask for it."""

    name: str
    overrides: tuple[str, ...]


def layouts(devices: int) -> Iterator[Layout]:
    """Replicas exchange least, and shards little more; what is computed again costs a third more; ranks that divide
    experts, rows or layers exchange in every layer, and stay within a machine; ranks of a pipeline wait for each other.
    """
    yield Layout("replicas", ())
    if devices > 1:
        yield Layout("shards", ("parallel.strategy=fsdp",))
    yield Layout("replicas, recomputed", (_RECOMPUTED,))
    if devices == 1:
        return
    sharded = ("parallel.strategy=fsdp", _RECOMPUTED)
    yield Layout("shards, recomputed", sharded)
    sizes = [size for size in (2, 4, 8) if size <= min(devices, MACHINE) and devices % size == 0]
    for axis, word in (("experts", "ep"), ("context", "cp"), ("tensor", "tp")):
        for size in sizes:
            yield Layout(f"shards x {axis} {size}, recomputed", (*sharded, f"parallel.mesh.{word}={size}"))
    for size in sizes:
        yield Layout(f"pipeline {size}, recomputed", (_RECOMPUTED, f"parallel.mesh.pp={size}"))
