"""Continue a run that another program began: convert the states in its checkpoint to those of this Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from windlass.assemble.rules import Progress
from windlass.checkpoint.foreign import ForeignCheckpoint, find_foreign, open_foreign
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_job_logger
from windlass.core.types import State
from windlass.data.update_batch import GroupSource
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together
from windlass.engine.executor import Executor
from windlass.engine.loop import Loop
from windlass.optim.schedule import FactorSchedule, Schedule

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignPlace:
    """The position of a foreign run in this run's data, as a number of updates since the start of an epoch."""

    epoch: int
    updates: int
    per_epoch: int | None
    position: State

    def progress(self, step: int) -> Progress | None:
        """The progress after `step` updates, in updates of this run; None if they have the same size."""
        if self.per_epoch is None:
            return None
        updates = self.epoch * self.per_epoch + self.updates
        return None if updates == step else Progress(step, updates)


def find_foreign_on_all(
    all_ranks: Gang, store: Store, which: Literal[True] | str
) -> ForeignCheckpoint | None:
    """The checkpoint of another program that `resume_from_checkpoint` names; None if it names none. The main
    process looks, and every rank opens what it found. Collective.
    """
    errors = (CheckpointError, OSError)
    folder = together(all_ranks, lambda: find_foreign(store, which) if all_ranks.rank == 0 else None, errors)
    found = all_ranks.broadcast_object(None if folder is None else str(folder))
    return together(all_ranks, lambda: None if found is None else open_foreign(Path(found)), errors)


def restore_foreign(
    checkpoint: ForeignCheckpoint,
    place: ForeignPlace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    executor: Executor,
    loop: Loop,
) -> None:
    """Restore optimizer, schedule, loss scaler and position; random generators start from this run's seed."""
    ours = isinstance(schedule, FactorSchedule)
    # A schedule of ours computes the rates of each update; another one continues from those of the groups.
    checkpoint.load_optimizer_of(optimizer, model, with_rates=not ours)
    if isinstance(schedule, FactorSchedule):
        schedule.load_state_dict({"step": checkpoint.step})
        _compare_rates(schedule, checkpoint)
    else:
        schedule.load_state_dict(checkpoint.schedule_state())
    executor.load_state_dict({"scaler": checkpoint.scaler_state()})
    loop.load_state_dict(_loop_state(place))
    logger.warning(
        "continuing from %s, which %s wrote, at step %d, %d updates into epoch %d. From here on "
        "the order of samples is this Trainer's, and random generators begin by this run's seed: nothing of either "
        "is taken from there. The next save is one of Windlass",
        checkpoint.folder,
        checkpoint.writer,
        checkpoint.step,
        place.updates,
        place.epoch,
    )


def find_place(checkpoint: ForeignCheckpoint, source: GroupSource, accumulation: int) -> ForeignPlace:
    """The place of a foreign run in this run's data."""
    step, whole = checkpoint.step, source.groups_per_epoch(accumulation)
    if not whole:
        # A stream has no known length, and an empty loader is refused where it is read. The epoch counts whole passes,
        # and the rest as a fraction of the run.
        epoch = int(checkpoint.epoch)
        updates = round((checkpoint.epoch - epoch) * checkpoint.max_steps) if epoch else step
        return ForeignPlace(epoch, updates, None, source.position_after(epoch, updates, accumulation))
    epoch, updates = divmod(step, whole)
    # transformers counts its epoch in micro-batches: with a short last update the fraction is off by less than one
    # update.
    if abs(checkpoint.epoch * whole - step) > 1:
        epoch = int(checkpoint.epoch)
        updates = round((checkpoint.epoch - epoch) * whole)
        epoch, updates = epoch + updates // whole, updates % whole
        logger.warning(
            "%s made %d updates in %.4g epochs, and an epoch has %d here: batch size, accumulation, processes or data "
            "differ. The run continues after the fraction of the data that it had seen",
            checkpoint.folder,
            step,
            checkpoint.epoch,
            whole,
        )
    position = source.position_after(epoch, updates, accumulation) if updates else {}
    return ForeignPlace(epoch, updates, whole, position)


def _loop_state(place: ForeignPlace) -> State:
    """The value of `Loop.state_dict` between two updates."""
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
    """Warn if this run's learning rate differs from the checkpoint's at the resumed step."""
    rates = checkpoint.learning_rates()
    if rates is None:
        logger.warning(
            "%s holds no learning rate to compare with; using this run's own schedule", checkpoint.folder
        )
        return
    here = schedule.lrs(checkpoint.step)
    pairs = list(zip(here, rates, strict=False)) if len(here) == len(rates) else [(here[0], rates[0])]
    differing = [pair for pair in pairs if not math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-15)]
    if differing:
        own, theirs = differing[0]
        logger.warning(
            "the learning rate of update %d is %.6g by this run's arguments, which are used, and %.6g by %s: the "
            "rate, the schedule, its warm-up or the number of updates differ, or updates were skipped there",
            checkpoint.step,
            own,
            theirs,
            checkpoint.folder,
        )
