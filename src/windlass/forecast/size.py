"""What is known of a run before it is laid out over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from windlass.core.errors import ConfigError, ModelError
from windlass.core.trees import tensors_in
from windlass.forecast.child import Child, apart
from windlass.forecast.meter import whole_bytes_of
from windlass.forecast.stack import find_stack


class Size(NamedTuple):
    """What an estimate of its cost needs to know of a run, whatever its layout is.

    Attributes:
        weights, trained: bytes of all parameters, and of those that are trained.
        layers: repeated blocks of the model.
        positions: of a micro-batch.
        micro_batches: of an update.
        element: bytes of a number of what a layer passes on.
        held: bytes of weights, gradients and the optimizer's state together, when it updates.
    """

    parameters: int
    weights: int
    trained: int
    layers: int
    positions: int
    micro_batches: int
    element: int
    held: int


def held_by_updates(
    model: nn.Module,
    create: Callable[[], torch.optim.Optimizer],
    computing: Callable[[], AbstractContextManager[Any]],
) -> int:
    """Bytes of all gradients and of the optimizer's state, from a step with few layers. 0 if there is no optimizer that
    can be made for a whole model.

    Args:
        create: the optimizer of the model, whose parameters have no memory then.
        computing: opens tensors without memory for computing.
    """
    stack = find_stack(model)

    def bytes_with(layers: int | None) -> int:
        if stack is not None and layers is not None:
            stack.cut(layers)
        optimizer, trained = create(), [p for p in model.parameters() if p.requires_grad]
        with computing():
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
        state = [value for entry in optimizer.state.values() for value in tensors_in(entry)]
        return sum(map(whole_bytes_of, (*trained, *state)))

    try:
        if stack is None or not Child.can_fork:
            return int(apart(partial(bytes_with, None)))
        # Each in a process of its own, because `cut` and the optimizer change the model.
        few, more = (int(apart(partial(bytes_with, layers))) for layers in (stack.few, stack.more))
    except (ConfigError, ModelError):
        return 0
    return few + (more - few) * ((stack.length - stack.few) // stack.period)
