"""Models without data: parameters that are created on the meta device (or any other) while the constructor runs.

A tensor on the meta device has a shape and a dtype but no data, so a model that is larger than the machine's memory can
be built, measured, and filled one tensor at a time (`load_checkpoint_and_dispatch`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from windlass.compat.big_models.module_tensors import META, renewed
from windlass.config.kinds import TRUE
from windlass.core.errors import ModelError

INCLUDE_BUFFERS_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Context: modules are built with all their parameters on the meta device.

    Weights that the constructor ties stay tied. Such a model cannot be moved with `.to(device)`: load its weights with
    `load_checkpoint_and_dispatch`.

    Args:
        include_buffers: create buffers on the meta device too. None: False, unless the environment variable
            ACCELERATE_INIT_INCLUDE_BUFFERS is true.
    """
    return init_on_device(META, include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Context: modules are built with all their parameters on `device`.

    Without buffers, each parameter is moved when it is registered, so at most one of them is in host memory at a time.
    With buffers, every tensor that the constructor creates is created on `device`. Raises ModelError for a lazy module,
    whose parameters have no shape yet.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = os.environ.get(INCLUDE_BUFFERS_VARIABLE, "").lower() in TRUE
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter
    # A parameter that is registered under two names must become one parameter on `device`.
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        if is_lazy(param):
            raise ModelError(
                f"{type(module).__name__}.{name} is lazy: it has no shape before the first forward and cannot be "
                f"created on {device}; build the module with explicit sizes"
            )
        if param not in moved:
            moved[param] = renewed(param, param.detach().to(device))
        module._parameters[name] = moved[param]

    nn.Module.register_parameter = register_on_device  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
