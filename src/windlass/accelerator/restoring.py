"""Restore a loop's checkpoint into the prepared objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from windlass.accelerator.prepared import Prepared
from windlass.checkpoint.manager import Checkpoint
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_STEP, derive_seed, load_rng_state, seed_generators
from windlass.dist.gang import Gang
from windlass.transforms.strategy import load_own_state

_log = get_logger(__name__)
_KINDS = {
    "models": "models",
    "optimizers": "optimizers",
    "schedules": "schedules",
    "custom": "registered objects",
}


def census(prepared: Prepared) -> dict[str, int]:
    """The number of prepared objects of each kind."""
    return {
        "models": len(prepared.strategies),
        "optimizers": len(prepared.optimizers),
        "schedules": len(prepared.schedules),
        "custom": len(prepared.custom),
    }


def model_name(index: int) -> str:
    """The name of model `index` in a checkpoint."""
    return f"model_{index}" if index else "model"


def check_fits(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Check that the checkpoint has as many objects of each kind as are prepared and registered now.

    Raises:
        CheckpointError: it does not; all kinds that differ are named.
    """
    if not checkpoint.has("loop"):
        raise CheckpointError(f"{checkpoint.folder} was not written by Accelerator.save_state")
    saved, now = checkpoint.shared("loop"), census(prepared)
    wrong = [
        f"{saved[kind]} {what} and {now[kind]} here"
        for kind, what in _KINDS.items()
        if saved[kind] != now[kind]
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(wrong)}: prepare and register the same objects, in the same order, "
            "before load_state"
        )


def load_models(checkpoint: Checkpoint, prepared: Prepared, models: list[nn.Module]) -> None:
    """Load the weights of the models that no hook has loaded."""
    for index, model in enumerate(models):
        strategy = prepared.strategy_of(model)
        checkpoint.load_weights(model if strategy is None else strategy.module, model_name(index))


def load_shared(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Load optimizers, schedules, registered objects and the loss scale."""
    for index, optimizer in enumerate(prepared.optimizers):
        checkpoint.load_optimizer(optimizer.optimizer, prepared.owner_of(optimizer), f"optimizer_{index}")
    for name, part in prepared.parts.items():
        part.load_state_dict(checkpoint.shared(name))


def load_rank(checkpoint: Checkpoint, prepared: Prepared, gang: Gang, device: torch.device) -> None:
    """Load positions in the data, this rank's own buffers, and the random generators."""
    same_world = checkpoint.world_size == gang.size
    source = gang.rank if same_world else 0
    states: list[Any] = checkpoint.per_rank("loaders", source)["states"]
    if len(states) != len(prepared.loaders):
        raise CheckpointError(
            f"{checkpoint.folder} holds the positions of {len(states)} loaders; prepared are {len(prepared.loaders)}"
        )
    for loader, state in zip(prepared.loaders, states, strict=True):
        loader.load_state_dict(state)
    load_rng_state(checkpoint.per_rank("rng", source), device)
    if not same_world:
        _log.warning(
            "%s was saved by %d process(es), this loop has %d: the order of samples goes on unchanged, random numbers "
            "of forwards do not", checkpoint.folder, checkpoint.world_size, gang.size
        )  # fmt: skip
        seed_generators(derive_seed(STREAM_STEP, torch.initial_seed(), gang.rank))
    saved: Mapping[str, Mapping[str, Any]] = checkpoint.per_rank("buffers", source)
    for index, strategy in enumerate(prepared.strategies):
        load_own_state(strategy, saved.get(str(index), {}), same_world)
