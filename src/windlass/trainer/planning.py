"""What a call of `train()` will do: the plan, the data as the engine takes it, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from windlass.assemble.batch import UpdateSize, update_size
from windlass.assemble.facts import Facts
from windlass.assemble.resolve import resolve, resolve_batch
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.manager import Checkpoint
from windlass.config.plan import RunPlan
from windlass.core.logs import get_job_logger
from windlass.core.world import World
from windlass.data.group import GroupSource
from windlass.data.loader import Loader
from windlass.dist.gang import Gang
from windlass.trainer.compare_ranks import check_plan_alike
from windlass.trainer.continuing import ForeignPlace, find_place
from windlass.trainer.inputs import group_source
from windlass.trainer.resuming import resumed_progress, saved_position, saved_update_size


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What is known of a run before anything is built.

    Attributes:
        size: what updates are made of.
        place: where a run of transformers' Trainer, if that is continued, is in this run's data.
    """

    plan: RunPlan
    source: GroupSource
    size: UpdateSize
    place: ForeignPlace | None


def plan_run(args: Any, gang: Gang, facts: Facts, loader: Any, checkpoint: Checkpoint | None) -> PlannedRun:
    """Plan a run over `loader`, from the beginning or from a checkpoint. Collective.

    Args:
        facts: all but what depends on the loader and the checkpoint.

    Raises:
        ConfigError: with every problem of the configuration. RankMismatchError: ranks would do different things.
    """
    source = group_source(args, facts.world, gang, loader, saved_position(checkpoint))
    saved_size = None if checkpoint is None else saved_update_size(checkpoint)
    size, note = update_size(args, gang.size, saved_size, facts.fits)
    if size.asked_micro is not None and isinstance(source, Loader):
        source.resize(size.micro, size.accumulation)
    place = progress = None
    if isinstance(checkpoint, ForeignCheckpoint):
        place = find_place(checkpoint, source, size.accumulation)
        progress = place.progress(checkpoint.step)
    elif checkpoint is not None:
        progress = resumed_progress(checkpoint, source, size.accumulation)
    per_epoch = source.groups_per_epoch(size.accumulation)
    facts = replace(facts, groups_per_epoch=per_epoch, resumed=progress, saved_size=saved_size)
    plan = resolve(args, facts)
    check_plan_alike(gang, plan)
    if note is not None:
        get_job_logger(__name__).warning(note)
    return PlannedRun(plan, source, size, place)


def planned_lengths(
    args: Any, gang: Gang, world: World, loader: Any, count: Callable[[Any], int]
) -> tuple[int, int, int, float, int, int, int]:
    """What a run over this loader amounts to; see `Trainer.set_initial_training_values`.

    Args:
        count: returns the samples of a loader of known length.
    """
    size, _ = update_size(args, gang.size)
    per_epoch = group_source(args, world, gang, loader).groups_per_epoch(size.accumulation)
    duration = resolve(args, Facts(world, per_epoch)).duration
    update, steps = size.samples, duration.steps
    if per_epoch is None:
        batches = steps * size.accumulation
        return duration.epochs, steps, update * steps, update * steps, update, batches, steps
    examples = count(loader)
    seen = update * steps if args.max_steps > 0 else examples * args.num_train_epochs
    return duration.epochs, per_epoch, examples, seen, update, len(loader), steps


def samples_of_update(args: Any, world: World) -> int:
    """Samples of one update: micro-batch, times accumulation, times ranks."""
    return resolve_batch(args, Facts(world, None)).update
