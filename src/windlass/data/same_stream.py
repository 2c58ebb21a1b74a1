"""Whether the ranks read one stream, which Windlass deals to them, or each a part that the stream itself cut.

PyTorch's documentation shows streams that split themselves: they look at the rank, or at the rank and the worker, and
leave out what belongs to others. Dealing such parts to the ranks once more would lose most samples without a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.dist.gang import Gang

_logger = get_job_logger(__name__)
_FAILED = "failed"


class Marked(Protocol):
    """Rows of a stream, of which the first of a pass carries checksums of its first samples."""

    marks: list[int]


RowT = TypeVar("RowT", bound=Marked)


def splits_itself(dataset: Any) -> bool:
    """Whether a stream was split by node already (`datasets.distributed.split_dataset_by_node`)."""
    return getattr(dataset, "_distributed", None) is not None


class NoSampleError(DataError):
    """A pass over a stream gave nothing."""


def begin_together(
    begin: Callable[[bool], Iterator[RowT]], gang: Gang, dataset: Any, *, may_be_empty: bool = False
) -> tuple[bool, Iterator[RowT]]:
    """Begin a pass, and find out whether the ranks read the same stream. Collective: one exchange if they do.

    Args:
        begin: the rows of the pass; called with True for this rank's own stream as a whole, with False for its share of
            the stream that all ranks read.
        may_be_empty: a rank may have no sample while others have some.

    Returns:
        Whether every rank reads a part of its own; and the rows of the pass, from the first on.

    Raises:
        DataError: on all ranks: they read different samples, and not the same ones when they begin again; or a rank has
            none. Where reading failed, the dataset's own error.
    """
    common = _Begun(begin(False))
    told = common.tell(gang)
    if all(marks == told[0] for marks in told):
        if common.nothing is not None:
            raise common.nothing
        return False, common.rows()
    common.close()
    own = _Begun(begin(True))
    told = own.tell(gang)
    if not all(gang.gather_objects(own.begins_like(common))):
        raise DataError(_UNREPEATABLE.format(type(dataset).__name__))
    idle = [rank for rank, marks in enumerate(told) if not marks]
    if idle and not may_be_empty:
        raise DataError(
            f"{type(dataset).__name__} gives every rank other samples (it splits itself), and ranks {idle} have no "
            "sample at all: it was split into fewer parts than there are processes. Split it further, or let it give "
            "all samples on every rank: Windlass deals them."
        )
    _logger.warning(_SPLITS_ITSELF, type(dataset).__name__)
    return True, own.rows()


_UNREPEATABLE = (
    "the ranks read different data from {}, and beginning it again gives other samples: it draws from a generator that "
    "is seeded differently on each rank, or it can be iterated only once. Seed it the same on every rank and in every "
    "pass, and its samples are dealt to the ranks; or let the main process read for all (dispatch_batches=True, in a "
    "loop of your own); or, to train on whatever each rank reads, hand in a loader of your own: override "
    "get_train_dataloader, or do not prepare it."
)
_SPLITS_ITSELF = (
    "%s gives every rank other samples: it splits itself. Each rank takes the part that it reads, and nothing is dealt "
    "again. On another number of processes the samples come in another order; a stream that gives all samples on every "
    "rank keeps its order on any number of them"
)


class _Begun(Generic[RowT]):
    """A pass of which the first row was read."""

    def __init__(self, rows: Iterator[RowT]) -> None:
        self.nothing: NoSampleError | None = None
        self._error: Exception | None = None
        self._first: RowT | None = None
        self._rest = rows
        try:
            self._first = next(rows, None)
        except NoSampleError as error:
            self.nothing = error
        except Exception as error:  # the other ranks wait for this one, and must hear of it
            self._error = error

    @property
    def marks(self) -> list[int]:
        return [] if self._first is None else self._first.marks

    def tell(self, gang: Gang) -> list[list[int]]:
        """The first samples' checksums on every rank. Collective; where reading failed on one, all raise."""
        told = gang.gather_objects(_FAILED if self._error is not None else self.marks)
        if self._error is not None:
            raise self._error
        failed = [rank for rank, marks in enumerate(told) if marks == _FAILED]
        if failed:
            raise DataError(
                f"ranks {failed} failed while reading the first samples; their own errors say why."
            )
        return told

    def begins_like(self, other: _Begun[RowT]) -> bool:
        """Whether both passes begin with the same samples, as far as both looked."""
        both = zip(self.marks, other.marks, strict=False)
        return bool(self.marks) == bool(other.marks) and all(mine == theirs for mine, theirs in both)

    def rows(self) -> Iterator[RowT]:
        if self._first is not None:
            yield self._first
        yield from self._rest

    def close(self) -> None:
        """End the pass, and with it workers that read for it alone."""
        if isinstance(self._rest, Generator):
            self._rest.close()
