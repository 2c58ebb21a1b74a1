"""The size of an update, which keeps its samples if the number of processes changes."""

from __future__ import annotations

from dataclasses import replace

from windlass.config import accelerator_config
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import BatchPlan, UpdateSize
from windlass.core.errors import Problem
from windlass.core.mesh import Mesh


def resolve_batches(args: TrainingArguments, mesh: Mesh, rank: int) -> BatchPlan:
    """The batches that the arguments ask for, on `rank` of the job. Raises ConfigError if processes do not divide a
    batch that they split.
    """
    ranks = mesh.size("data")
    micro, asked = args.train_batch_size_of(ranks), args.gradient_accumulation_steps
    samples, row = args.global_batch_size, micro * ranks
    fits = samples is not None and samples > 0 and samples % row == 0  # `objections` reports the others
    return BatchPlan(
        micro=micro,
        accumulation=samples // row if samples is not None and fits else asked,
        ranks=ranks,
        rank=mesh.ranks("data", rank).index(rank),
        eval=args.eval_batch_size_of(ranks),
        asked=asked,
        fixed=samples is not None,
        finds=args.auto_find_batch_size,
        split=accelerator_config.read(args.accelerator_config).split_batches,
    )


def update_size(
    plan: BatchPlan, saved: UpdateSize | None = None, fits: int | None = None
) -> tuple[UpdateSize, str | None]:
    """Return the size of this run's updates, and a note to log if it differs from the arguments.

    `global_batch_size` decides if it is set. Otherwise a run that is resumed with the same arguments keeps the samples
    of its updates, on any number of processes that divides them.

    Args:
        saved: the size in the checkpoint that is resumed. With `auto_find_batch_size` its micro-batches are a limit.
        fits: samples of the largest micro-batch that fits in memory, if an earlier attempt measured it.
    """
    size, note = plan.size, None
    limits = [size.micro] if fits is None else [size.micro, fits]
    # The samples of an update are kept on other processes, since the schedule counts updates, but not if the user has
    # changed the arguments. `asked_micro` is None if no micro-batch had to be made smaller.
    if saved is not None and (saved.asked_micro or saved.micro, saved.asked) == (size.micro, size.asked):
        if not plan.fixed:
            size, note = _kept(size, saved.samples)
        if plan.finds:
            limits.append(saved.micro)
    return size.within(min(limits)), note


def _kept(size: UpdateSize, samples: int) -> tuple[UpdateSize, str | None]:
    """`size` with the samples of the run that is resumed, if its micro-batches divide them; and the note to log."""
    micro, ranks = size.micro, size.ranks
    if samples == size.samples:
        return size, None
    if samples % (micro * ranks):
        return size, (
            f"an update had {samples} samples and now has {size.samples}: {samples} is not a multiple of "
            f"per_device_train_batch_size={micro} x {ranks} processes. Set global_batch_size and a batch size that "
            "divides it to keep the size"
        )
    kept = replace(size, accumulation=samples // (micro * ranks))
    return kept, (
        f"an update keeps its {samples} samples: {micro} x {kept.accumulation} micro-batches x {ranks} processes "
        f"(gradient_accumulation_steps is {size.asked})"
    )


def objections(args: TrainingArguments, ranks: int) -> list[Problem]:
    """Problems with `global_batch_size` in a job of `ranks` processes."""
    wanted, micro = args.global_batch_size, args.train_batch_size_of(ranks)
    if wanted is None:
        return []
    if wanted < 1 or wanted % (micro * ranks):
        fix = f"must be a multiple of per_device_train_batch_size={micro} x {ranks} processes"
        return [Problem("global_batch_size", wanted, fix)]
    if args.gradient_accumulation_steps not in (1, wanted // (micro * ranks)):
        fix = (
            f"contradicts gradient_accumulation_steps={args.gradient_accumulation_steps}, which makes updates of "
            f"{micro * args.gradient_accumulation_steps * ranks} samples; give one of the two"
        )
        return [Problem("global_batch_size", wanted, fix)]
    return []
