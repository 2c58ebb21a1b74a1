"""Refusing a model whose checkpoints could not be resumed, before the first update."""

from __future__ import annotations

from torch import nn

from windlass.checkpoint.restorable import check_restorable
from windlass.config.plan import SavePlan
from windlass.core.errors import CheckpointError, ModelError
from windlass.dist.gang import Gang


def check_saved_model(model: nn.Module, plan: SavePlan, gang: Gang) -> None:
    """Check a model of which whole weights will be saved. Every rank calls it.

    Raises:
        ModelError: its state cannot be saved, or does not come back; on every rank.
    """
    if plan.cadence.strategy == "no" and plan.every is None:
        return
    problem = None
    try:
        check_restorable(model)
    except CheckpointError as error:
        problem = str(error)
    found = [told for told in gang.gather_objects(problem) if told is not None]
    if found:
        raise ModelError(f"this model cannot be resumed from a checkpoint: {found[0]}")
