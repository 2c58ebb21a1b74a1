"""From a script or a recipe to the trace of one update: its own code runs up to `train()`, without weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from windlass.core.device import without_accelerators
from windlass.core.errors import ModelError
from windlass.core.mesh import Mesh
from windlass.dist.imagined import imagined_job
from windlass.forecast.child import Child, apart
from windlass.forecast.fake_weights import fake_weights, new_mode
from windlass.forecast.rehearsal import Rehearsal
from windlass.forecast.size import Size
from windlass.forecast.trace import Trace
from windlass.precision.check import for_any_device
from windlass.trainer.instead import RunRequest, instead_of_runs
from windlass.zero.building import DividedBuilding

_T = TypeVar("_T")


_VALUES = (
    "A plan runs a script up to its first Trainer.train(), with weights that have no values: a script that computes "
    "with them before, or trains in a loop of its own, cannot be planned."
)


class _Planned(BaseException):
    """Ends the script once its run was looked at; not an `Exception`, which a script may catch."""


def trace_of(
    start: Callable[[], Any], world: int = 1, rank: int = 0, *, whole: bool = False, on_device: bool = False
) -> Trace:
    """The trace of the first run that `start` would begin, on a rank of `world` processes.

    Args:
        whole: run all layers of the model, and not few of those that repeat.
        on_device: what depends on the kind of a device is done as on one that is not a CPU.

    Raises:
        ModelError: `start` calls no `train()`, or its model cannot be run without values. ConfigError: as the run.
    """
    return _rehearsed(_traced, start, world, rank, whole=whole, on_device=on_device)


def size_of(start: Callable[[], Any], world: int = 1) -> Size:
    """What an estimate needs of the run that `start` would begin. Raises as `trace_of`."""
    return _rehearsed(lambda rehearsal: rehearsal.size, start, world, 0, whole=True, on_device=True)


def check_run(start: Callable[[], Any], world: int = 1) -> None:
    """Make what the run would train with, and no update. Raises as `trace_of`."""

    def build(rehearsal: Rehearsal) -> None:
        rehearsal.build(None if rehearsal.stack is None else rehearsal.stack.few)

    _rehearsed(build, start, world, 0, whole=False, on_device=True)


def _rehearsed(
    use: Callable[[Rehearsal], _T],
    start: Callable[[], Any],
    world: int,
    rank: int,
    *,
    whole: bool,
    on_device: bool,
) -> _T:
    """What `use` makes of the rehearsal of the first run that `start` would begin."""
    mode = new_mode()
    found: list[_T] = []

    def planned(request: RunRequest) -> NoReturn:
        found.append(use(Rehearsal(request, mode, on_device=on_device, whole=whole or not Child.can_fork)))
        raise _Planned

    with (
        imagined_job(world, rank),
        without_accelerators(),  # tensors without memory stay on the CPU, whatever the run is planned for
        fake_weights(mode),
        instead_of_runs(planned),
        DividedBuilding.paused(),  # `planned` refuses what DeepSpeed runs
        for_any_device() if on_device else contextlib.nullcontext(),
        contextlib.suppress(_Planned),
    ):
        try:
            start()
        except RuntimeError as error:
            error.add_note(_VALUES)
            raise
    if not found:
        raise ModelError(
            "the script ended without a call of Trainer.train(), so there is no run to plan; give it the arguments "
            "with which it trains"
        )
    return found[0]


def trace_of_largest(
    start: Callable[[], Any], world: int = 1, *, on_device: bool = False, room: float = math.inf
) -> Trace:
    """As `trace_of`, on the rank of a pipeline whose peak is largest. The ranks of other layouts are equal but for
    remainders, of which rank 0 has the most.

    Args:
        room: bytes from which on it does not matter which rank takes more.
    """
    first = trace_of(start, world, on_device=on_device)
    mesh = Mesh(**first.facts["mesh"])
    if mesh.pipeline == 1 or first.peak[1].total > room:
        return first

    def traced(rank: int) -> dict[str, Any]:
        return trace_of(start, world, rank, on_device=on_device).to_dict()

    # The pipeline is the outermost axis. A script is run again in a process of its own.
    each = mesh.size("stage")
    ranks = [number * each for number in range(mesh.pipeline)]
    traces = [first, *(Trace.from_dict(apart(partial(traced, rank))) for rank in ranks[1:])]
    peaks = [found.peak[1].total for found in traces]
    largest = traces[peaks.index(max(peaks))]
    state = sum(found.saved["optimizer state"] for found in traces)
    facts = {**largest.facts, "peaks": [list(each) for each in zip(ranks, peaks, strict=True)]}
    return replace(largest, saved={**largest.saved, "optimizer state": state}, facts=facts)


def _traced(rehearsal: Rehearsal) -> Trace:
    """Backwards are run in other processes alone: where there are devices, autograd has threads after the first one,
    and no process that is forked after it can run another.
    """

    def run(layers: int | None) -> dict[str, Any]:
        return rehearsal.run(layers).to_dict()

    stack = rehearsal.stack
    if stack is None:
        return Trace.from_dict(apart(partial(run, None)))
    with Child(partial(run, stack.few)) as few, Child(partial(run, stack.more)) as more:
        return Trace.from_dict(few.result()).with_layers(
            Trace.from_dict(more.result()), (stack.length - stack.few) // stack.period
        )
