"""What processes of a loop exchange: outputs of an evaluation, one row for each sample, and states of generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.accumulation import ActiveLoader
from windlass.config.enums import RNGType
from windlass.core.errors import ConfigError, Problem
from windlass.core.trees import recursively_apply
from windlass.dist import operations
from windlass.dist.gang import Gang, current
from windlass.dist.operations import broadcast


def gather_samples(data: Any, loader: ActiveLoader | None, data_ranks: Gang, use_gather_object: bool) -> Any:
    """Gather exactly one row for each sample of the current batch; see `Accelerator.gather_for_metrics`. `loader`: the
    loader that is being iterated, if any.
    """
    # If a stream ends earlier on this process than on others, it has fillers before the last batch too.
    ends = loader is not None and (loader.end_of_dataloader or loader.is_filler)
    as_objects = use_gather_object or not _has_tensors_alone(data)
    if loader is not None and ends:
        of_samples = partial(_of_samples, loader=loader, ranks=data_ranks.size)
        data = of_samples(data) if as_objects else recursively_apply(of_samples, data)
    if as_objects:
        if data_ranks.size == 1:
            return data
        gathered = [item for part in data_ranks.gather_objects(data) for item in part]
    else:
        gathered = operations.gather(data, gang=data_ranks)
    if loader is None or loader.samples_here is not None or not loader.end_of_dataloader:
        return gathered
    # A loader that the script wrote itself: only the number of samples over all processes is known.
    kept = loader.remainder if loader.remainder > 0 else None
    if as_objects:
        return gathered[:kept]
    return recursively_apply(lambda tensor: tensor[:kept] if tensor.ndim else tensor, gathered)


def _has_tensors_alone(data: Any) -> bool:
    found: list[Tensor] = []
    try:
        recursively_apply(found.append, data, error_on_other_type=True)
    except TypeError:
        return False
    # Of an empty list nothing tells: other ranks may have plain values in theirs.
    return bool(found)


def _of_samples(rows: Any, loader: ActiveLoader, ranks: int) -> Any:
    """The rows of a tensor, or of a list of values, that belong to samples of this process."""
    if isinstance(rows, Tensor) and rows.ndim == 0:
        return rows.reshape(1)[:0] if loader.is_filler else rows
    if not isinstance(rows, Tensor | list | tuple):
        return type(rows)() if loader.is_filler else rows
    if loader.is_filler:
        return rows[:0]
    here, full = loader.samples_here, loader.batch_size
    # None: the batches are those of a sampler.
    if full is None:
        full = (loader.total_batch_size or 0) // ranks
    # Only what has the rows of a full batch has too many; others have the rows that the script made.
    return rows[:here] if here is not None and here < len(rows) == full else rows


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
