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
from windlass.optim.groups import decay_parameter_names
from windlass.optim.schedule import FactorSchedule
from windlass.trainer.saving import SavingMixin

logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a foreign run stands in this run's data: so many updates behind the beginning of an epoch."""

    epoch: int
    updates: int
    per_epoch: int | None
    position: State


class ContinuingMixin(SavingMixin):
    """Checkpoints of transformers' Trainer."""

    _foreign_place: _Place | None = None

    def _find_foreign(self, store: Store, which: Literal[True] | str) -> ForeignCheckpoint | None:
        """The checkpoint of transformers' Trainer that `resume_from_checkpoint` means, None where it means none. The
        main process looks, and every rank opens what it found; all of them call it.
        """
        found, problem = None, None
        if self.is_world_process_zero():
            try:
                folder = find_foreign(store, which)
                found = None if folder is None else str(folder)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        found, problem = self._gang.broadcast_object([found, problem])
        opened = None
        if found is not None:
            try:
                opened = open_foreign(Path(found))
            except (CheckpointError, OSError) as error:
                problem = str(error)
        problems = [told for told in self._gang.gather_objects(problem) if told is not None]
        if problems:
            raise CheckpointError(problems[0])
        return opened

    def _foreign_progress(self, checkpoint: ForeignCheckpoint, source: GroupSource) -> Progress | None:
        """Find the run's place in this run's data; gives what it amounts to where updates had another size there."""
        accumulation = self._update_size.accumulation
        place = _find_place(checkpoint, source, accumulation)
        self._foreign_place = place
        if place.per_epoch is None:
            return None
        amounts_to = place.epoch * place.per_epoch + place.updates
        return None if amounts_to == checkpoint.step else Progress(checkpoint.step, amounts_to)

    def _restore_foreign(self, checkpoint: ForeignCheckpoint) -> None:
        """Optimizer, schedule, loss scaler and the position in the data; randomness begins anew, by this run's seed.

        Raises:
            CheckpointError: a part is missing, or does not fit.
        """
        run = self._run
        place = self._foreign_place
        assert self.optimizer is not None, "a run that steps has an optimizer"
        assert place is not None, "the place was found before the plan was made"
        ours = isinstance(run.schedule, FactorSchedule)
        checkpoint.load_divided_optimizer(self.optimizer, self.model, self._divisions(), with_rates=not ours)
        if ours:
            run.schedule.load_state_dict({"step": checkpoint.step})
            _compare_rates(run.schedule, checkpoint)
        else:
            run.schedule.load_state_dict(_required(checkpoint, SCHEDULE_NAME))
        run.executor.load_state_dict({"scaler": _scaler_state(checkpoint.plain(SCALER_NAME))})
        run.loop.load_state_dict(_loop_state(place))
        run.unfinished = {}
        run.seed_step.start(checkpoint.step)
        self._newest_checkpoint, self._rollbacks = None, 0
        logger.warning(
            "continuing from %s, which transformers' Trainer wrote, at step %d, %d updates into epoch %d. From here on "
            "the order of samples is this Trainer's, and random generators begin by this run's seed: nothing of either "
            "is taken from there. The next save is one of Windlass",
            checkpoint.folder, checkpoint.step, place.updates, place.epoch,
        )  # fmt: skip

    def _divisions(self) -> list[Division]:
        """How the parameters may have been put into groups there: as this run does, as transformers does, in one."""
        assert self.optimizer is not None
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        by_id = {id(parameter): name for name, parameter in trained.items()}
        present = [
            [by_id[id(p)] for p in group["params"] if id(p) in by_id] for group in self.optimizer.param_groups
        ]
        decaying = set(decay_parameter_names(self.model, norms=(nn.LayerNorm,)))
        theirs = [
            [name for name in trained if name in decaying],
            [name for name in trained if name not in decaying],
        ]
        return [present, theirs, [list(trained)]]


def _find_place(checkpoint: ForeignCheckpoint, source: GroupSource, accumulation: int) -> _Place:
    step, whole = checkpoint.step, source.groups_per_epoch(accumulation)
    if whole is None:
        # Of a stream, whose length nobody knows, its epoch counts whole passes, and the rest in shares of the run.
        epoch = int(checkpoint.epoch)
        updates = round((checkpoint.epoch - epoch) * checkpoint.max_steps) if epoch else step
        return _Place(epoch, updates, None, source.position_after(epoch, updates, accumulation))
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
    return _Place(epoch, updates, whole, position)


def _loop_state(place: _Place) -> State:
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
