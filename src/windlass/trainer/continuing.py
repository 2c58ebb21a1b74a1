"""Continuing a run that transformers' Trainer began: what its checkpoint holds, put where this Trainer keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from windlass.assemble.facts import Progress
from windlass.checkpoint.foreign import (
    SCALER_NAME,
    SCHEDULE_NAME,
    ForeignCheckpoint,
    find_foreign,
    open_foreign,
)
from windlass.checkpoint.foreign_optimizer import Division
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_job_logger
from windlass.core.types import State
from windlass.data.group import GroupSource
from windlass.dist.gang import Gang
from windlass.engine.executor import Executor
from windlass.engine.loop import Loop
from windlass.optim.groups import decay_parameter_names
from windlass.optim.schedule import FactorSchedule, Schedule

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignPlace:
    """Where a foreign run is in this run's data: so many updates after the beginning of an epoch."""

    epoch: int
    updates: int
    per_epoch: int | None
    position: State

    def progress(self, step: int) -> Progress | None:
        """What `step` updates amount to here, if updates had another size there."""
        if self.per_epoch is None:
            return None
        amounts_to = self.epoch * self.per_epoch + self.updates
        return None if amounts_to == step else Progress(step, amounts_to)


def find_foreign_on_all(gang: Gang, store: Store, which: Literal[True] | str) -> ForeignCheckpoint | None:
    """The checkpoint of transformers' Trainer that `resume_from_checkpoint` means, None if it means none. The main
    process looks, and every rank opens what it found. Collective.
    """
    found, problem = None, None
    if gang.rank == 0:
        try:
            folder = find_foreign(store, which)
            found = None if folder is None else str(folder)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    found, problem = gang.broadcast_object([found, problem])
    opened = None
    if found is not None:
        try:
            opened = open_foreign(Path(found))
        except (CheckpointError, OSError) as error:
            problem = str(error)
    problems = [told for told in gang.gather_objects(problem) if told is not None]
    if problems:
        raise CheckpointError(problems[0])
    return opened


def restore_foreign(
    checkpoint: ForeignCheckpoint, place: ForeignPlace, model: nn.Module, optimizer: torch.optim.Optimizer,
    schedule: Schedule, executor: Executor, loop: Loop,
) -> None:  # fmt: skip
    """Restore optimizer, schedule, loss scaler and the position in the data; randomness begins by this run's seed.

    Raises:
        CheckpointError: a part is missing, or does not fit.
    """
    ours = isinstance(schedule, FactorSchedule)
    checkpoint.load_divided_optimizer(optimizer, model, _divisions(optimizer, model), with_rates=not ours)
    if isinstance(schedule, FactorSchedule):
        schedule.load_state_dict({"step": checkpoint.step})
        _compare_rates(schedule, checkpoint)
    else:
        schedule.load_state_dict(_required(checkpoint, SCHEDULE_NAME))
    executor.load_state_dict({"scaler": _scaler_state(checkpoint.plain(SCALER_NAME))})
    loop.load_state_dict(_loop_state(place))
    logger.warning(
        "continuing from %s, which transformers' Trainer wrote, at step %d, %d updates into epoch %d. From here on "
        "the order of samples is this Trainer's, and random generators begin by this run's seed: nothing of either "
        "is taken from there. The next save is one of Windlass",
        checkpoint.folder, checkpoint.step, place.updates, place.epoch,
    )  # fmt: skip


def _divisions(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Division]:
    """How the parameters may have been put into groups there: as this run does, as transformers does, in one."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_id = {id(parameter): name for name, parameter in trained.items()}
    present = [[by_id[id(p)] for p in group["params"] if id(p) in by_id] for group in optimizer.param_groups]
    decaying = set(decay_parameter_names(model, norms=(nn.LayerNorm,)))
    theirs = [
        [name for name in trained if name in decaying],
        [name for name in trained if name not in decaying],
    ]
    return [present, theirs, [list(trained)]]


def find_place(checkpoint: ForeignCheckpoint, source: GroupSource, accumulation: int) -> ForeignPlace:
    """The place of a foreign run in this run's data."""
    step, whole = checkpoint.step, source.groups_per_epoch(accumulation)
    if whole is None:
        # Of a stream, whose length nobody knows, its epoch counts whole passes, and the rest in shares of the run.
        epoch = int(checkpoint.epoch)
        updates = round((checkpoint.epoch - epoch) * checkpoint.max_steps) if epoch else step
        return ForeignPlace(epoch, updates, None, source.position_after(epoch, updates, accumulation))
    epoch, updates = divmod(step, whole)
    if abs(checkpoint.epoch * whole - step) > 1:
        epoch = int(checkpoint.epoch)
        updates = round((checkpoint.epoch - epoch) * whole)
        epoch, updates = epoch + updates // whole, updates % whole
        logger.warning(
            "%s made %d updates in %.4g epochs, and an epoch has %d here: batch size, accumulation, processes or data "
            "are others. The run goes on behind as much of the data as it had seen",
            checkpoint.folder, step, checkpoint.epoch, whole,
        )  # fmt: skip
    position = source.position_after(epoch, updates, accumulation) if updates else {}
    return ForeignPlace(epoch, updates, whole, position)


def _loop_state(place: ForeignPlace) -> State:
    """As `Loop.state_dict` gives it between two updates."""
    return {
        "epoch": place.epoch,
        "updates_in_epoch": place.updates,
        "updates_per_epoch": place.per_epoch,
        "epoch_open": place.updates > 0,
        "data_spent": False,
        "epoch_stopped": False,
        "position": place.position,
        "extra_epochs": 0,
    }


def _compare_rates(schedule: FactorSchedule, checkpoint: ForeignCheckpoint) -> None:
    """Say where the learning rate does not go on as it would have gone on there."""
    saved = checkpoint.plain(SCHEDULE_NAME)
    rates = saved.get("_last_lr") if isinstance(saved, dict) else None
    if not isinstance(rates, list) or not rates or not all(isinstance(rate, float) for rate in rates):
        logger.warning(
            "%s says no learning rate to compare with: this run's own schedule holds", checkpoint.folder
        )
        return
    here = schedule.lrs(checkpoint.step)
    pairs = list(zip(here, rates, strict=False)) if len(here) == len(rates) else [(here[0], rates[0])]
    differing = [pair for pair in pairs if not math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-15)]
    if differing:
        own, theirs = differing[0]
        logger.warning(
            "the learning rate of update %d is %.6g by this run's arguments, which hold, and %.6g by %s: the rate, the "
            "schedule, its warm-up or the number of updates differ, or updates were skipped there",
            checkpoint.step, own, theirs, checkpoint.folder / SCHEDULE_NAME,
        )  # fmt: skip


def _required(checkpoint: ForeignCheckpoint, name: str) -> Any:
    content = checkpoint.plain(name)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{checkpoint.folder / name} is missing or holds no state, and this run's scheduler keeps a count of its "
            "own that it must go on from"
        )
    return content


def _scaler_state(saved: Any) -> State:
    """The loss scaler's state as `precision.scaler` keeps it; empty where there was none."""
    if not saved:
        return {}
    scale, streak = (
        (saved.get(key) for key in ("scale", "_growth_tracker")) if isinstance(saved, dict) else (0, 0)
    )
    if not isinstance(scale, float) or not isinstance(streak, int) or not scale > 0:
        raise CheckpointError(f"{SCALER_NAME} of the checkpoint does not hold the state of a loss scaler")
    return {
        "scale": torch.tensor(scale),
        "growth_streak": torch.tensor(streak, dtype=torch.int32),
        "skipped": 0,
        "skips_in_a_row": 0,
    }
