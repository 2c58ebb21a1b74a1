"""The size of an update, which keeps its samples if the number of processes changes."""

from __future__ import annotations

from typing import Any

from windlass.config.plan import UpdateSize
from windlass.core.errors import Problem


def update_size(
    args: Any, world: int, saved: UpdateSize | None = None, fits: int | None = None
) -> tuple[UpdateSize, str | None]:
    """Return the size of this run's updates, and a note to log if it differs from the arguments.

    `global_batch_size` decides if it is set. Otherwise a run that is resumed with the same arguments keeps the samples
    of its updates, on any number of processes that divides them.

    Args:
        saved: the size in the checkpoint that is resumed. With `auto_find_batch_size` its micro-batches are a limit.
        fits: samples of the largest micro-batch that fits in memory, if an earlier attempt measured it.
    """
    size, note = _asked_size(args, world, saved)
    limits = [size.micro] if fits is None else [size.micro, fits]
    if saved is not None and args.auto_find_batch_size and _continues(args, world, saved):
        limits.append(saved.micro)
    return size.within(min(limits)), note


def _continues(args: Any, world: int, saved: UpdateSize) -> bool:
    """Return True if the arguments are those of the run that is resumed."""
    asked = args.train_batch_size_of(world), args.gradient_accumulation_steps
    return (saved.asked_micro or saved.micro, saved.asked) == asked


def _asked_size(args: Any, world: int, saved: UpdateSize | None) -> tuple[UpdateSize, str | None]:
    micro, asked = args.train_batch_size_of(world), args.gradient_accumulation_steps
    plain = UpdateSize(micro, asked, world, asked)
    continued = saved if saved is not None and _continues(args, world, saved) else plain
    samples = args.global_batch_size or continued.samples
    if samples == plain.samples:
        return plain, None
    if samples % (micro * world):
        return plain, (
            f"an update had {samples} samples and now has {plain.samples}: {samples} is not a multiple of "
            f"per_device_train_batch_size={micro} x {world} processes. Set global_batch_size and a batch size that "
            "divides it to keep the size"
        )
    kept = UpdateSize(micro, samples // (micro * world), world, asked)
    if args.global_batch_size:
        return kept, None
    return kept, (
        f"an update keeps its {samples} samples: {micro} x {kept.accumulation} micro-batches x {world} processes "
        f"(gradient_accumulation_steps is {asked})"
    )


def objections(args: Any, world: int) -> list[Problem]:
    """Problems with `global_batch_size` in a job of `world` processes."""
    wanted, micro = args.global_batch_size, args.train_batch_size_of(world)
    if wanted is None:
        return []
    if wanted < 1 or wanted % (micro * world):
        fix = f"must be a multiple of per_device_train_batch_size={micro} x {world} processes"
        return [Problem("global_batch_size", wanted, fix)]
    if args.gradient_accumulation_steps not in (1, wanted // (micro * world)):
        fix = (
            f"contradicts gradient_accumulation_steps={args.gradient_accumulation_steps}, which makes updates of "
            f"{micro * args.gradient_accumulation_steps * world} samples; give one of the two"
        )
        return [Problem("global_batch_size", wanted, fix)]
    return []
