"""What is known of a run before it is laid out over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windlass.callbacks.weight_averaging import SWACallback
from windlass.checkpoint.adapters import find_adapter
from windlass.config.plan import SavePlan
from windlass.core.errors import ConfigError, ModelError
from windlass.core.trees import tensors_in
from windlass.dist.sharded import Absent
from windlass.forecast.child import Child, apart
from windlass.forecast.meter import bytes_of, whole_bytes_of
from windlass.forecast.stack import find_stack
from windlass.transforms.staged_model import staged_of


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


def sizes_of_save(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: SWACallback | None, plan: SavePlan
) -> dict[str, int]:
    """Bytes of a checkpoint over all ranks, and of this rank's copy of it in host memory."""
    adapter = find_adapter(model)  # its base is not saved
    named = model.named_parameters(remove_duplicate=False)
    weights = {id(p): p for name, p in named if adapter is None or name in adapter.names}.values()
    staged = staged_of(model)
    # Tied parameters of two stages are saved once.
    copies: Collection[Tensor] = () if staged is None else set(staged.copies)
    state = [
        value
        for parameter, entry in optimizer.state.items()
        for value in (entry.values() if isinstance(entry, Mapping) else ())
        if isinstance(value, Tensor) and parameter not in copies and not plan.model_only
    ]
    here = [p for p in weights if not isinstance(p, Absent) and p not in copies]
    # Rank 0 has all of it.
    averaged = 0 if average is None else average.saved_bytes()
    return {
        "weights": sum(p.numel() * p.element_size() for p in weights) + averaged,
        "optimizer state": sum(map(whole_bytes_of, state)),
        "here": sum(map(bytes_of, (*here, *state))) + averaged,
    }
