"""Models without memory: parameters made on the meta device (or any other) while the constructor runs.

A tensor on the meta device has a shape, a dtype and no data, so that a model larger than the machine can be built,
measured and given its weights one at a time (`load_checkpoint_and_dispatch`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from windlass.core.errors import ModelError
from windlass.transforms.module_tensors import renewed

INCLUDE_BUFFERS_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Within this context, modules are built with all their parameters on the meta device.

    Weights that the constructor ties stay tied. Such a model cannot be moved with `.to(device)`: give it weights with
    `load_checkpoint_and_dispatch`.

    Args:
        include_buffers: buffers go to the meta device as well. `None` means no, unless the variable
            ACCELERATE_INIT_INCLUDE_BUFFERS says otherwise.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Within this context, modules are built with all their parameters on `device`.

    Without buffers each parameter is moved as it is registered, so that at most one of them lies in host memory beside
    the finished ones. With buffers every tensor that the constructor makes is made on `device` in the first place.

    Raises:
        ModelError: a lazy module, whose parameters have no shape yet.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = _asked_by_environment()
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter
    # A parameter registered under two names is one parameter; without this memory each name would get its own.
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        if is_lazy(param):
            raise ModelError(
                f"{type(module).__name__}.{name} is lazy: it has no shape before the first forward, and cannot be "
                f"made on {device}; build the module with its sizes"
            )
        if param not in moved:
            moved[param] = renewed(param, param.detach().to(device))
        module._parameters[name] = moved[param]

    nn.Module.register_parameter = register_on_device  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _asked_by_environment() -> bool:
    return os.environ.get(INCLUDE_BUFFERS_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y", "t")
