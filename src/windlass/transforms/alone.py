"""The strategy of a single process, which holds the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.module_state import bare
from windlass.transforms.buffers import OwnBuffers
from windlass.transforms.strategy import device_of, squared_norm

_NOTHING = contextlib.nullcontext()


class Alone:
    """Implements `Strategy` for one process; base of other strategies. The module is on its device already."""

    sharded = False
    saves_parts = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = OwnBuffers(module)
        devices = {p.device for p in module.parameters() if p.requires_grad}
        self._one_device = len(devices) <= 1

    @property
    def model(self) -> nn.Module:
        return self._module

    @property
    def module(self) -> nn.Module:
        return self._module

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            return torch.zeros((), device=device_of(self._module))
        if self._one_device:
            norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            return norms
        return torch.nn.utils.get_total_norm(gradients)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def agree(self, flag: Tensor) -> Tensor:
        return flag

    def reduced(self, parameter: nn.Parameter) -> Iterable[nn.Parameter]:
        return (parameter,)

    def left_over(self) -> Iterable[nn.Parameter]:
        return ()

    def square(self, gradient: Tensor) -> Tensor:
        return squared_norm(gradient).to(device_of(self._module))

    def norm_of(self, square: Tensor) -> Tensor:
        return square.sqrt()

    def check_reached(self) -> None:
        """No wrapper that a forward could bypass."""

    def check_used(self) -> None:
        """No gradient is reduced."""

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Nothing to do: the first update is like all others, and sums over ranks have one order."""

    def share_buffers(self) -> None:
        """No other rank."""

    def own_buffers(self) -> dict[str, Tensor]:
        return self._buffers.unsaved()

    def buffers_of_first_rank(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def whole_state(self) -> dict[str, Any]:
        return dict(bare(self._module).state_dict())

    def gathered(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def generating(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def release(self) -> None:
        """Nothing is held."""
