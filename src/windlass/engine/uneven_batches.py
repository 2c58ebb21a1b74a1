"""Evaluation batches of which ranks may have different numbers: padded, or left by all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from windlass.core.errors import DataError
from windlass.dist.gang import Gang
from windlass.dist.lockstep import Lockstep, answer_until_all_are_done

T = TypeVar("T")

Placed = tuple[list[int] | None, Any]
"""(dataset positions, batch); positions are empty if unknown, and None for a batch that only fills in."""


class EvaluationAbandoned(BaseException):
    """All ranks leave an evaluation where it is. Not an error: code that handles errors must let it pass."""


def pad_uneven_batches(batches: Iterable[Placed], gang: Gang) -> Iterator[Placed]:
    """This rank's batches, and its last one again (as a filler) while other ranks still have some. Collective.

    For models whose every forward needs all ranks. Costs one exchange between hosts for each batch: loaders of our own
    know the ends beforehand and do without.

    Raises:
        DataError: this rank has nothing to fill in with.
    """
    remaining, last, rounds = iter(batches), None, Lockstep[Placed | None](gang)
    while True:
        placed = next(remaining, None)
        rounds.begin(placed, placed is not None)
        if not rounds.end().going_on:
            return
        if placed is not None:
            last = copy.copy(placed[1])  # a step may take labels out of it
            yield placed
        elif last is None:
            raise DataError(
                f"rank {gang.rank} got no evaluation batch from the script's own loader, and a sharded model needs "
                "every rank in each forward: give every process at least one batch, or evaluate in fewer processes"
            )
        else:
            yield None, copy.copy(last)


def interruptible_batches(
    batches: Iterable[T],
    gang: Gang,
    signals: Callable[[], Sequence[float]],
    agreed: Callable[[Sequence[float]], None],
    in_step: bool = False,
) -> Generator[T, None, None]:
    """The batches, of which ranks may have different numbers; before each the ranks exchange signals, one batch ahead.

    A rank that has run out keeps answering until all have. One that leaves early, for an error of its own or of its
    data, answers the others until they have run out, too; therefore who iterates must close the iterator.

    Args:
        signals: what this rank tells the others.
        agreed: called with the sums, at the same exchange on every rank; it may raise `EvaluationAbandoned`.
        in_step: every forward needs all ranks. One that leaves early answers nobody then, for the others wait for it
            in a forward, and are let go when its process ends.
    """
    remaining, rounds = iter(batches), Lockstep[T | None](gang)
    with _others_answered(gang, signals, silent=in_step):
        batch = next(remaining, None)
    while True:
        rounds.begin(batch, batch is not None, signals())
        summed = rounds.end()
        # If no rank goes on, none waits for an answer.
        with _others_answered(gang, signals, silent=in_step or not summed.going_on):
            agreed(summed.sums)
        if not summed.going_on:
            return
        if batch is not None:
            with _others_answered(gang, signals, silent=in_step):
                yield batch
                batch = next(remaining, None)


@contextmanager
def _others_answered(gang: Gang, signals: Callable[[], Sequence[float]], *, silent: bool) -> Iterator[None]:
    """Keeps the exchanges going if this rank leaves: closed by who iterates, or with an error. Not if `silent`."""
    try:
        yield
    except (Exception, GeneratorExit):
        if not silent:
            answer_until_all_are_done(gang, len(signals()))
        raise
