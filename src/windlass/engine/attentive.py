"""An evaluation in whose course the ranks still hear of each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from windlass.dist.gang import Gang

T = TypeVar("T")


class EvaluationAbandoned(BaseException):
    """All ranks leave an evaluation where it is. No error: code that handles errors must let it pass."""


def attentive(
    batches: Iterable[T],
    gang: Gang,
    signals: Callable[[], Sequence[float]],
    agreed: Callable[[Sequence[float]], None],
) -> Generator[T, None, None]:
    """The batches, of which ranks may have different numbers; before each the ranks exchange signals, one batch ahead.

    A rank that has run out keeps answering until all have. One that leaves early, for an error of its own, must close
    the iterator (`contextlib.closing`): it answers the others until they have run out, too.

    Args:
        signals: what this rank tells the others.
        agreed: called with the sums, at the same exchange on every rank; it may raise `EvaluationAbandoned`.
    """
    remaining = iter(batches)
    batch = next(remaining, None)
    while True:
        told = gang.start_sum([float(batch is not None), *signals()])
        going_on, *sums = told.wait()
        agreed(sums)
        if not going_on:
            return
        if batch is not None:
            try:
                yield batch
            except GeneratorExit:
                _answer_until_all_are_done(gang, signals)
                raise
            batch = next(remaining, None)


def _answer_until_all_are_done(gang: Gang, signals: Callable[[], Sequence[float]]) -> None:
    silent = [0.0] * len(signals())
    while gang.size > 1 and gang.start_sum([0.0, *silent]).wait()[0]:
        pass
