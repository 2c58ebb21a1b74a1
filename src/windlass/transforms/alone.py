"""One process holds the whole model: there is nothing to reduce and nobody to share with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.module_state import bare
from windlass.transforms.buffers import OwnBuffers
from windlass.transforms.strategy import device_of, load_state

_NOTHING = contextlib.nullcontext()


class Alone:
    """A module as it is. Also what the parts of other strategies fall back on.

    Args:
        module: on its device already.
    """

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

    def check_reached(self) -> None:
        """There is nothing that a forward could go past."""

    def check_used(self) -> None:
        """No gradient waits for another."""

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """The first update is like every other."""

    def share_buffers(self) -> None:
        """Nobody to share with."""

    def own_buffers(self) -> dict[str, Tensor]:
        return self._buffers.unsaved()

    def buffers_of_first_rank(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def whole_state(self) -> dict[str, Any]:
        return dict(bare(self._module).state_dict())

    def load_whole_state(self, state: Mapping[str, Tensor]) -> None:
        load_state(self._module, state)

    def gathered(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def release(self) -> None:
        """Nothing is held."""
