"""From a script or a recipe to the trace of one update: its own code runs up to `train()`, without weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.core.errors import ModelError
from windlass.dist.imagined import imagined_job
from windlass.forecast.child import Child
from windlass.forecast.fake_weights import fake_weights, new_mode
from windlass.forecast.rehearsal import Rehearsal
from windlass.forecast.stack import find_stack
from windlass.forecast.trace import Trace
from windlass.trainer.instead import RunRequest, instead_of_runs


class _Traced(BaseException):
    """Ends the script once its run was looked at; not an `Exception`, which a script may catch."""


def trace_of(start: Callable[[], Any], world: int = 1, *, whole: bool = False) -> Trace:
    """The trace of the first run that `start` would begin, on rank 0 of `world` processes.

    Args:
        whole: run all layers of the model, and not few of those that repeat.

    Raises:
        ModelError: `start` calls no `train()`, or its model cannot be run without values. ConfigError: as the run.
    """
    mode = new_mode()
    found: list[Trace] = []

    def planned(request: RunRequest) -> NoReturn:
        found.append(_traced(request, mode, whole))
        raise _Traced

    with (
        imagined_job(world),
        fake_weights(mode),
        instead_of_runs(planned),
        contextlib.suppress(_Traced),
    ):
        start()
    if not found:
        raise ModelError(
            "the script ended without a call of Trainer.train(), so there is no run to plan; give it the arguments "
            "with which it trains"
        )
    return found[0]


def _traced(request: RunRequest, mode: FakeTensorMode, whole: bool) -> Trace:
    stack = None if whole or not Child.can_fork else find_stack(request.hooks.model)
    rehearsal = Rehearsal(request, mode, stack)
    if stack is None:
        return rehearsal.run()
    child = Child(lambda: rehearsal.run(stack.more).to_dict())
    few = rehearsal.run(stack.few)
    more = Trace.from_dict(child.result())
    return few.with_layers(more, (stack.length - stack.few) // stack.period)
