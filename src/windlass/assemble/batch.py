"""How many micro-batches make an update, so that its samples stay as many when the number of processes changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from windlass.core.errors import Problem
from windlass.core.types import State


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """What the updates of a run were made of.

    Attributes:
        micro, accumulation, world: samples of a micro-batch, micro-batches of an update, processes.
        asked: `gradient_accumulation_steps` as the arguments had it, from which `accumulation` may have been derived.
        asked_micro: `per_device_train_batch_size` as the arguments had it, where memory holds only smaller ones.
    """

    micro: int
    accumulation: int
    world: int
    asked: int
    asked_micro: int | None = None

    @property
    def samples(self) -> int:
        return self.micro * self.accumulation * self.world

    def within(self, limit: int) -> UpdateSize:
        """The same update, in micro-batches of at most `limit` samples."""
        if limit >= self.micro:
            return self
        samples = self.micro * self.accumulation
        micro = max(size for size in range(1, limit + 1) if samples % size == 0)
        asked = self.asked_micro or self.micro
        return replace(self, micro=micro, accumulation=samples // micro, asked_micro=asked)

    def to_dict(self) -> State:
        return asdict(self)


def update_size(
    args: Any, world: int, saved: UpdateSize | None = None, fits: int | None = None
) -> tuple[UpdateSize, str | None]:
    """The size of this run's updates, and a sentence where it is not what the arguments say.

    `global_batch_size` decides where it is given. Otherwise a run that is continued with the arguments it had keeps
    the samples of its updates, on any number of processes that divides them.

    Args:
        saved: the size in the checkpoint that is continued. Under `auto_find_batch_size` its micro-batches are not
            exceeded either.
        fits: samples of the largest micro-batch that memory may hold, where an earlier attempt found out.
    """
    size, note = _asked_size(args, world, saved)
    limits = [size.micro] if fits is None else [size.micro, fits]
    if saved is not None and args.auto_find_batch_size and _continues(args, saved):
        limits.append(saved.micro)
    return size.within(min(limits)), note


def _continues(args: Any, saved: UpdateSize) -> bool:
    """Whether the arguments are those of the run that is continued."""
    asked = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return (saved.asked_micro or saved.micro, saved.asked) == asked


def _asked_size(args: Any, world: int, saved: UpdateSize | None) -> tuple[UpdateSize, str | None]:
    micro, asked = args.per_device_train_batch_size, args.gradient_accumulation_steps
    plain = UpdateSize(micro, asked, world, asked)
    continued = saved if saved is not None and _continues(args, saved) else plain
    samples = args.global_batch_size or continued.samples
    if samples == plain.samples:
        return plain, None
    if samples % (micro * world):
        return plain, (
            f"an update had {samples} samples and has {plain.samples} from here on: {samples} is no multiple of "
            f"per_device_train_batch_size={micro} x {world} processes. Set global_batch_size and a batch size that "
            "divides it to keep it"
        )
    kept = UpdateSize(micro, samples // (micro * world), world, asked)
    if args.global_batch_size:
        return kept, None
    return kept, (
        f"an update keeps its {samples} samples: {micro} x {kept.accumulation} micro-batches x {world} processes "
        f"(gradient_accumulation_steps says {asked})"
    )


def objections(args: Any, world: int) -> list[Problem]:
    """What is wrong with `global_batch_size` in a job of this many processes."""
    wanted, micro = args.global_batch_size, args.per_device_train_batch_size
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
