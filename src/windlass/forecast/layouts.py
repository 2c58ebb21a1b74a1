"""Layouts for a number of devices: what each asks of a recipe, and what it costs by estimate."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from windlass.config.parallel import rows_training as rows
from windlass.core.errors import ConfigError, Problem
from windlass.core.mesh import AXES, Axis, Mesh
from windlass.dist.imagined import MACHINE
from windlass.forecast.size import Size
from windlass.metrics.device_peaks import NETWORK, Board

_FORM = re.compile(r"([0-9]{1,6})x([0-9]{1,6})GB", re.IGNORECASE)
_USED = 0.9
"""The share of a device's memory that tensors may take: the runtime and the allocator need some, too."""
_WITHIN: tuple[Axis, ...] = ("expert", "context", "sequence", "tensor")
"""Axes that exchange in every layer, and so stay within a machine."""
_ASKED: tuple[Axis, ...] = (*_WITHIN, "pipeline")
"""Axes that a run may refuse."""
_LATENCY = 2e-5
"""Seconds until a collective begins, about."""
_NAMES: dict[Axis, str] = {"replicate": "replicas", "shard": "shards", "expert": "experts"}
# The settings of `_ASKED`, and both spellings of each in the `parallel` section of a recipe.
_KEYS = (rows.MESH_EXPERT, rows.MESH_CONTEXT, rows.MESH_SEQUENCE, rows.MESH_TENSOR, rows.MESH_PIPELINE)
_SPELLINGS = {key.name: key.words[-1] for key in (rows.MESH_REPLICAS, rows.MESH_SHARDS, *_KEYS)}


class Devices(NamedTuple):
    """So many devices, each with so many bytes."""

    number: int
    memory: int

    @classmethod
    def read(cls, text: str) -> Devices:
        """Read "8x80GB". Raises ConfigError for any other form."""
        found = _FORM.fullmatch(text.strip())
        if found is None or int(found[1]) < 1 or int(found[2]) < 1:
            fix = "is written as the number of devices and the memory of each (up to 999999), such as 8x80GB"
            raise ConfigError(Problem("--fit", text, fix))
        return cls(int(found[1]), int(found[2]) * 10**9)

    @property
    def room(self) -> int:
        """Bytes of a device that tensors may take."""
        return int(self.memory * _USED)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread a run.

    Attributes:
        sharded: the ranks of a replica each store a part of its parameters (FSDP).
        recomputed: activations are computed again in the backward.
    """

    mesh: Mesh = field(default_factory=Mesh)
    sharded: bool = False
    recomputed: bool = False

    @property
    def name(self) -> str:
        """Such as "pipeline 2 x shards 4, recomputed"."""
        words = [f"{_NAMES.get(axis, axis)} {size}" for axis, size in self.mesh.used().items()]
        if self.sharded and self.mesh.shard == 1:
            words.insert(0, "sharded")
        return (" x ".join(words) or "one device") + (", recomputed" if self.recomputed else "")

    @property
    def asked(self) -> frozenset[str]:
        """What of it a run may refuse: the sizes of axes, and that parameters are sharded."""
        used = [(axis, self.mesh.along(axis)) for axis in _ASKED if self.mesh.along(axis) > 1]
        words = [word for axis, size in used for word in (axis, f"{axis} {size}")]
        return frozenset([*words, "sharded"] if self.sharded else words)

    @property
    def divisors(self) -> dict[str, int]:
        """Into how many parts the memory of each kind is divided at most."""
        mesh = self.mesh
        shards = mesh.shard * mesh.size("context") if self.sharded else 1
        return {
            "state": mesh.tensor * mesh.pipeline * mesh.expert * shards,
            "activations": mesh.size("model"),
            "gathered": mesh.tensor,
        }

    def parts(self) -> Iterator[Layout]:
        """Each part of what a run may refuse by itself, on as few ranks as have it."""
        for axis in _ASKED:
            if (size := self.mesh.along(axis)) > 1:
                yield Layout(Mesh(**{axis: size}))
        if self.sharded:
            yield Layout(Mesh(shard=2), sharded=True)

    def overrides(self, recipe: Mapping[str, Any]) -> tuple[str, ...]:
        """What changes `recipe`, the values of a recipe file, into this layout. Whatever it sets of the layout is set
        again, in the spelling that it has.
        """
        mesh, training = self.mesh, recipe.get("training") or {}
        wanted: dict[str, Any] = {
            key.name: None if mesh.along(axis) == 1 else mesh.along(axis)
            for axis, key in zip(_ASKED, _KEYS, strict=True)
        }
        wanted[rows.MESH_REPLICAS.name] = mesh.replicate if self.sharded and mesh.replicate > 1 else None
        wanted[rows.MESH_SHARDS.name] = None
        # A strategy or an axis that is set both there and in `parallel` is refused if the two differ.
        found = ["training.parallelism_config=null"] if training.get("parallelism_config") else []
        shards = bool(training.get("fsdp"))
        if shards and not self.sharded:
            found.append("training.fsdp=null")
        wanted["strategy"] = "fsdp" if self.sharded and not shards else None
        for word, value in _flat(recipe.get("parallel") or {}):
            name = next(
                (full for full, short in _SPELLINGS.items() if word in (short, f"mesh.{short}")), word
            )
            if name in wanted and (new := wanted.pop(name)) != value:
                found.append(f"parallel.{word}={'null' if new is None else new}")
        found += [
            f"parallel.{_SPELLINGS.get(name, name)}={new}" for name, new in wanted.items() if new is not None
        ]
        word = (
            "gradient_checkpointing" if "gradient_checkpointing" in training else "activation_checkpointing"
        )
        if bool(training.get(word)) != self.recomputed:
            found.append(f"training.{word}={str(self.recomputed).lower()}")
        return tuple(sorted(found))


def _flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for word, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{word}.")
        else:
            yield f"{before}{word}", value


def layouts(devices: int, micro_batches: int) -> Iterator[Layout]:
    """All products of axes that make so many ranks. Those that exchange in every layer stay within a machine, and a
    pipeline has no more stages than an update has micro-batches: most of them would wait.
    """
    for pipeline in (size for size in _divisors(devices) if size <= micro_batches):
        each = devices // pipeline
        # Each divisor of `each` up to MACHINE divides this number too, which has fewer large ones.
        for sizes in itertools.product(
            _divisors(math.gcd(each, math.lcm(*range(1, MACHINE + 1)))), repeat=len(_WITHIN)
        ):
            inner = math.prod(sizes)
            if inner > MACHINE or each % inner:
                continue
            for shard in _divisors(each // inner):
                mesh = Mesh(
                    each // inner // shard, shard, pipeline=pipeline, **dict(zip(_WITHIN, sizes, strict=True))
                )
                for sharded in _ways(mesh):
                    yield Layout(mesh, sharded)
                    yield Layout(mesh, sharded, recomputed=True)


def _ways(mesh: Mesh) -> tuple[bool, ...]:
    """Whether the parameters may be sharded, or must be: a replica has several ranks that store the same otherwise."""
    if mesh.shard > 1:
        return (True,)
    return (False, True) if mesh.size("context") * mesh.expert > 1 else (False,)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# --- what a layout costs ----------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a layout costs by estimate; layouts are compared by these in order.

    Attributes:
        seconds: all ranks that compute a micro-batch together, times the seconds that they take for it.
        recomputed: activations are computed twice.
        exchange: seconds of collectives.
        axes: the number of axes in use.
    """

    seconds: float
    recomputed: bool
    exchange: float
    axes: int


def cost_of(layout: Layout, size: Size, board: Board) -> Cost:
    """Products of matrices, collectives in rings, and the wait at both ends of a pipeline (arXiv:2104.04473, section
    2.2), at the rates of a data sheet. A trace counts what an estimate leaves out, and takes seconds.
    """
    mesh, together = layout.mesh, layout.mesh.size("model")
    # For each parameter and position 2 in the forward and 4 in the backward (arXiv:2001.08361, section 2.1).
    flops = (8 if layout.recomputed else 6) * size.parameters * size.positions
    compute = flops / together / (1e12 * board.rates.get("bf16", board.rates["fp32"]))
    seconds_of = {
        axis: calls * _LATENCY + nbytes / (1e9 * (board.link if _is_within(mesh, axis) else NETWORK))
        for axis, (nbytes, calls) in exchanged(layout, size).items()
    }
    exchange = sum(seconds_of.values())
    # Parameters and gradients travel beside the products of other layers; a layer waits for its activations.
    beside = seconds_of.get("replicate", 0.0) + seconds_of.get("shard", 0.0)
    wait = 1 + (mesh.pipeline - 1) / size.micro_batches
    seconds = together * max((compute + exchange - beside) * wait, beside)
    # In three digits: an estimate that is better by less is no reason for another axis.
    return Cost(float(f"{seconds:.3g}"), layout.recomputed, float(f"{exchange:.3g}"), len(mesh.used()))


def _is_within(mesh: Mesh, axis: Axis) -> bool:
    inner = AXES[AXES.index(axis) :]
    return math.prod(map(mesh.along, inner)) <= MACHINE


def exchanged(layout: Layout, size: Size) -> dict[Axis, tuple[float, float]]:
    """Bytes that a rank sends for a micro-batch, and in how many collectives, by axis."""
    mesh, micro_batches = layout.mesh, size.micro_batches
    layers, part = size.layers / mesh.pipeline, 1 / (mesh.tensor * mesh.pipeline)
    # From layer to layer; the width follows from parameters = 12 layers width^2 (arXiv:2001.08361, section 2.1).
    passed = size.positions * math.sqrt(size.parameters / (12 * size.layers)) * size.element
    passed /= mesh.size("context")
    passes = layers * (3 if layout.recomputed else 2)
    shards = mesh.size("loss") // mesh.replicate if layout.sharded else 1
    copies = mesh.size("loss") // shards
    reduced = part * size.trained / micro_batches
    found: dict[Axis, tuple[float, float]] = {
        "replicate": (2 * _ring(copies) * reduced / shards, 1 / micro_batches),
        # Weights are gathered in the forward and again in the backward; gradients are reduced once in an update.
        "shard": (_ring(shards) * (2 * part * size.weights + reduced), 3 * layers),
        # Two all-reduces in a layer and direction (arXiv:1909.08053, section 3), and a ring sends a tensor twice
        # for each.
        "tensor": (4 * passes * _ring(mesh.tensor) * passed, 2 * passes),
        # Keys and values go once round a ring (arXiv:2310.01889); in the backward their gradients do, too.
        "context": (
            2 * (passes + layers) * (mesh.context - 1) * passed / mesh.tensor,
            2 * passes * (mesh.context - 1),
        ),
        # Four all-to-alls: of queries, keys and values, and of the result (arXiv:2309.14509).
        "sequence": (4 * passes * _ring(mesh.sequence) * passed / mesh.tensor, 4 * passes),
        "expert": (4 * passes * _ring(mesh.expert) * passed, 2 * passes),
        "pipeline": (2 * passed, 2.0),
    }
    # Gradients are reduced over all ranks of the loss, and shards are among all of them in a replica.
    used = set(mesh.used()) | ({"replicate"} if copies > 1 else set())
    used |= {"shard"} if shards > 1 else set()
    return {axis: each for axis, each in found.items() if axis in used}


def _ring(ranks: int) -> float:
    """The share of a tensor that a rank sends in one way round a ring."""
    return (ranks - 1) / ranks
