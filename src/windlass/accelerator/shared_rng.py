"""Seeds and generators over the processes of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.state import PartialState
from windlass.config.plugin_words import RNGType
from windlass.core import rng
from windlass.core.errors import ConfigError, Problem
from windlass.dist.operations import broadcast


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and PyTorch on every device.

    Args:
        device_specific: every process its own seed, `seed` plus its index.
        deterministic: also ask for deterministic kernels.
    """
    rng.set_seed(seed + (PartialState().process_index if device_specific else 0), deterministic)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """Give every process the main process's state of one generator. Collective.

    Args:
        rng_type: "torch" for the CPU's default generator, "generator" for the one handed in, or a kind of device.

    Raises:
        ConfigError: no generator handed in, or a kind of device that this process does not compute on.
    """
    state = PartialState()
    read, write = _access(RNGType(str(rng_type)), generator, state.device)
    if state.use_distributed:
        write(broadcast(read().clone()))


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Give every process the main process's state of several generators. Collective."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _access(
    kind: RNGType, generator: torch.Generator | None, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """How the state of that generator is read and written; states are host tensors."""
    if kind == RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ConfigError(Problem("rng_types", str(kind), "needs the generator; hand it in"))
        return generator.get_state, generator.set_state
    if kind != device.type:
        fix = f"this process computes on {device.type}; give torch, generator or {device.type}"
        raise ConfigError(Problem("rng_types", str(kind), fix))
    module = torch.get_device_module(device)
    return module.get_rng_state, module.set_rng_state
