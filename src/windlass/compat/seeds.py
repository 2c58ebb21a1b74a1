"""Seeds and generators over the processes of a job, as functions that find the process by themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from windlass.accelerator.shared_rng import share_rng_states
from windlass.compat.state import PartialState
from windlass.config.enums import RNGType
from windlass.core import rng


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and PyTorch on every device.

    Args:
        device_specific: use a different seed on each process: `seed` plus its index.
        deterministic: also select deterministic kernels.
    """
    rng.set_seed(seed + (PartialState().process_index if device_specific else 0), deterministic)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Copy the states of the main process's generators to all processes. Collective. Raises ConfigError if no generator
    was passed, or a type of device that this process does not use.

    Args:
        rng_types: "torch" for the CPU's default generator, "generator" for `generator`, or a type of device.
    """
    share_rng_states(rng_types, PartialState().device, generator)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """`synchronize_rng_states` for one generator."""
    synchronize_rng_states([str(rng_type)], generator)
