"""An evaluation in whose course the ranks still hear of each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    remaining = iter(batches)
    with _others_answered(gang, signals, silent=in_step):
        batch = next(remaining, None)
    while True:
        told = gang.start_sum([float(batch is not None), *signals()])
        going_on, *sums = told.wait()
        # Where nobody goes on, nobody waits for an answer.
        with _others_answered(gang, signals, silent=in_step or not going_on):
            agreed(sums)
        if not going_on:
            return
        if batch is not None:
            with _others_answered(gang, signals, silent=in_step):
                yield batch
                batch = next(remaining, None)


@contextmanager
def _others_answered(gang: Gang, signals: Callable[[], Sequence[float]], *, silent: bool) -> Iterator[None]:
    """Keeps the exchanges going where this rank leaves: closed by who iterates, or with an error. Not if `silent`."""
    try:
        yield
    except (Exception, GeneratorExit):
        if not silent:
            _answer_until_all_are_done(gang, signals)
        raise


def _answer_until_all_are_done(gang: Gang, signals: Callable[[], Sequence[float]]) -> None:
    silent = [0.0] * len(signals())
    while gang.size > 1 and gang.start_sum([0.0, *silent]).wait()[0]:
        pass
