"""Detects if the ranks read one stream, which Windlass deals to them, or a part each, cut by the stream itself.

PyTorch's documentation shows streams that split themselves: they read the rank, or the rank and the worker, and leave
out the samples of others. Dealing such parts to the ranks again would lose most samples without an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.logs import get_job_logger
from windlass.data.batch_reader import DealtBatch
from windlass.dist.gang import Gang

_logger = get_job_logger(__name__)
_FAILED = "failed"


def splits_itself(dataset: Any) -> bool:
    """Return True if a stream was split by node (`datasets.distributed.split_dataset_by_node`)."""
    return getattr(dataset, "_distributed", None) is not None


class NoSampleError(DataError):
    """A pass over a stream has no sample."""


def begin_together(
    begin: Callable[[bool], Iterator[DealtBatch]],
    data_ranks: Gang,
    dataset: Any,
    *,
    may_be_empty: bool = False,
) -> tuple[bool, Iterator[DealtBatch]]:
    """Begin a pass, and find out if the ranks read the same stream. Collective: one exchange if they do.

    Args:
        begin: the rows of the pass; called with True for this rank's own stream as a whole, with False for its share of
            the stream that all ranks read.
        may_be_empty: a rank may have no sample while others have some.

    Returns:
        True if every rank reads a part of its own; and the rows of the pass, from the first on.

    Raises:
        DataError: on all ranks: they read different samples, and not the same ones when they begin again; or a rank has
            none. On a rank that failed to read, the dataset's own error.
    """
    common = BegunPass(begin(False))
    everywhere = common.gather_marks(data_ranks)
    if all(marks == everywhere[0] for marks in everywhere):
        if common.nothing is not None:
            raise common.nothing
        return False, common.rows()
    # Its workers would go on reading beside those of the pass that is begun now.
    common.close()
    own = BegunPass(begin(True))
    everywhere = own.gather_marks(data_ranks)
    if not all(data_ranks.gather_objects(own.begins_like(common))):
        raise DataError(_UNREPEATABLE.format(type(dataset).__name__))
    idle = [rank for rank, marks in enumerate(everywhere) if not marks]
    if idle and not may_be_empty:
        raise DataError(
            f"{type(dataset).__name__} returns other samples on every rank (it splits itself), and ranks {idle} have "
            "no sample at all: it was split into fewer parts than there are processes. Split it further, or let it "
            "return all samples on every rank: Windlass deals them."
        )
    _logger.warning(_SPLITS_ITSELF, type(dataset).__name__)
    return True, own.rows()


def check_dispatched(
    marks: list[int], read_again: Callable[[], list[int]], data_ranks: Gang, dataset: Any
) -> None:
    """Raise on all ranks if a stream that the main process reads for all of them splits itself by rank. Collective.

    Other ranks may have no stream at all, or one that returns other samples in each pass: the main process's counts.
    Raises ConfigError if the stream of another rank begins with other samples, and with the same ones when read again.

    Args:
        marks: checksums of the first samples that this rank read; empty if it read none.
        read_again: returns them once more; called on other ranks than the main one.
    """
    first, *others = data_ranks.gather_objects(marks)
    # `map` ends with the shorter list: a rank that read nothing, or less, does not differ.
    differ = {rank for rank, their in enumerate(others, 1) if any(map(operator.ne, their, first))}
    if not differ:
        return
    repeated = data_ranks.gather_objects(data_ranks.rank in differ and read_again() == marks)
    parts = [rank for rank in sorted(differ) if repeated[rank]]
    if parts:
        fix = (
            f"{type(dataset).__name__} returns other samples on ranks {parts} than on the main process, which reads "
            "for all of them: if it splits itself by rank, the rest would be lost. Use dispatch_batches=False, with "
            "which each rank reads its part, or let it return the same samples on every rank"
        )
        raise ConfigError(Problem("dispatch_batches", True, fix))


_UNREPEATABLE = (
    "the ranks read different data from {}, and beginning it again returns other samples: it draws from a generator "
    "that is seeded differently on each rank, or it can be iterated only once. Seed it the same on every rank and in "
    "every pass, and its samples are dealt to the ranks; or let the main process read for all "
    "(dispatch_batches=True); or, to train on whatever each rank reads, hand in a loader of your own: override "
    "get_train_dataloader, or do not prepare it."
)
_SPLITS_ITSELF = (
    "%s returns other samples on every rank: it splits itself. Each rank takes the part that it reads, and nothing is "
    "dealt again. On another number of processes the samples come in another order; a stream that returns all samples "
    "on every rank keeps its order on any number of them"
)


class BegunPass:
    """A pass whose first row was read."""

    def __init__(self, rows: Iterator[DealtBatch]) -> None:
        self.nothing: NoSampleError | None = None
        self._error: Exception | None = None
        self._first: DealtBatch | None = None
        self._rest = rows
        try:
            self._first = next(rows, None)
        except NoSampleError as error:
            self.nothing = error
        except Exception as error:  # raised after the exchange that the other ranks wait in
            self._error = error

    @property
    def marks(self) -> list[int]:
        return [] if self._first is None else self._first.marks

    def gather_marks(self, data_ranks: Gang) -> list[list[int]]:
        """The first samples' checksums on every rank. Collective; if reading failed on one, all raise."""
        everywhere = data_ranks.gather_objects(_FAILED if self._error is not None else self.marks)
        if self._error is not None:
            raise self._error
        failed = [rank for rank, marks in enumerate(everywhere) if marks == _FAILED]
        if failed:
            raise DataError(
                f"ranks {failed} failed while reading the first samples; their own errors say why."
            )
        return everywhere

    def begins_like(self, other: BegunPass) -> bool:
        """Return True if both passes begin with the same samples, as far as both were read."""
        differ = any(map(operator.ne, self.marks, other.marks))
        return bool(self.marks) == bool(other.marks) and not differ

    def rows(self) -> Iterator[DealtBatch]:
        error = self.nothing or self._error
        if error is not None:
            raise error
        if self._first is not None:
            yield self._first
        yield from self._rest

    def close(self) -> None:
        """End the pass, and with it the workers that read only for it."""
        if isinstance(self._rest, Generator):
            self._rest.close()
