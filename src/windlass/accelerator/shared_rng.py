"""Random generators in the same state on all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from windlass.config.enums import RNGType
from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import current
from windlass.dist.operations import broadcast


def share_rng_states(
    kinds: Iterable[RNGType | str], device: torch.device, generator: torch.Generator | None = None
) -> None:
    """Copy the states of the main process's generators to all processes: "torch", "generator" or a device type."""
    for kind in kinds:
        read, write = _access(RNGType(str(kind)), generator, device)
        if current().size > 1:
            write(broadcast(read().clone()))


def _access(
    kind: RNGType, generator: torch.Generator | None, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """The functions that read and write the state of that generator, which is a host tensor."""
    if kind == RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ConfigError(Problem("rng_types", str(kind), "needs the argument `generator`"))
        return generator.get_state, generator.set_state
    if kind != device.type:
        fix = f"this process computes on {device.type}; give torch, generator or {device.type}"
        raise ConfigError(Problem("rng_types", str(kind), fix))
    module = torch.get_device_module(device)
    return module.get_rng_state, module.set_rng_state
