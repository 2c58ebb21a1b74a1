"""Evaluation batches whose number may differ between ranks: padded, or abandoned by all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from windlass.core.errors import DataError
from windlass.dist.ending import leaves_others
from windlass.dist.gang import Gang
from windlass.dist.lockstep import Lockstep, answer_until_all_are_done

T = TypeVar("T")

Placed = tuple[list[int] | None, Any]
"""(dataset positions, batch); positions are empty if unknown, and None for a filler."""


class EvaluationAbandoned(BaseException):
    """All ranks abandon an evaluation. Not an error: code that handles errors must let it pass."""


def pad_uneven_batches(batches: Iterable[Placed], all_ranks: Gang) -> Iterator[Placed]:
    """This rank's batches, then its last one again (as a filler) while other ranks have more. Collective.

    For models whose every forward needs all ranks, and for metrics of each batch. Costs one exchange between hosts for
    each batch; Windlass's own loaders know their lengths and do not need it.

    Raises:
        DataError: this rank has no batch to repeat.
    """
    remaining, last, rounds = iter(batches), None, Lockstep[Placed | None](all_ranks)
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
                f"rank {all_ranks.rank} got no evaluation batch from the script's own loader, and every rank takes "
                "part in each batch, because of a sharded model or a metric of each batch: give every process at "
                "least one batch, or evaluate in fewer processes"
            )
        else:
            yield None, copy.copy(last)


def interruptible_batches(
    batches: Iterable[T],
    all_ranks: Gang,
    signals: Callable[[], Sequence[float]],
    received: Callable[[Sequence[float]], None],
    in_step: bool = False,
) -> Generator[T, None, None]:
    """The batches, whose number may differ between ranks; before each the ranks exchange signals, one batch ahead.

    A rank without more data keeps answering until no rank has any. So does a rank that leaves early because of an error
    of its own or of its data; therefore the caller must close the iterator.

    Args:
        signals: returns the signals of this rank.
        received: called with the sums, at the same exchange on every rank; it may raise `EvaluationAbandoned`.
        in_step: every forward needs all ranks, or they meet at each batch. A rank that leaves early does not answer
            then, because the others wait for it there.
    """
    remaining, rounds = iter(batches), Lockstep[T | None](all_ranks)
    batch, failure = next_of(remaining)
    while True:
        rounds.begin(batch, batch is not None or failure is not None, signals())
        summed = rounds.end()
        # If no rank goes on, none waits for an answer.
        with _others_answered(all_ranks, signals, silent=in_step or not summed.going_on):
            # Not before: the others were in this exchange, and learn of it where they meet next.
            if failure is not None:
                raise failure
            received(summed.sums)
        if not summed.going_on:
            return
        if batch is not None:
            with _others_answered(all_ranks, signals, silent=in_step):
                yield batch
            batch, failure = next_of(remaining)


def next_of(batches: Iterator[T]) -> tuple[T | None, Exception | None]:
    """The next batch, None at the end; or the error with which reading it failed."""
    try:
        return next(batches, None), None
    except Exception as error:
        if leaves_others(error):
            raise
        return None, error


@contextmanager
def _others_answered(
    all_ranks: Gang, signals: Callable[[], Sequence[float]], *, silent: bool
) -> Iterator[None]:
    """Unless `silent`, continue to answer if this rank leaves the body early: closed by its caller, or by an error."""
    try:
        yield
    except (Exception, GeneratorExit) as error:
        if not (silent or leaves_others(error)):
            answer_until_all_are_done(all_ranks, len(signals()))
        raise
