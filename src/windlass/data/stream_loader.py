"""The loader of a dataset that can only be iterated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.types import Collator, State
from windlass.data.bookmark import Bookmark, belongs
from windlass.data.group import Group
from windlass.data.loader import Loader
from windlass.data.same_stream import NoSampleError, begin_together, splits_itself
from windlass.data.stream import StreamReader, StreamRow, StreamRows
from windlass.dist.gang import Gang

logger = get_logger(__name__)
_NOTHING = contextlib.nullcontext()


class _Held(NamedTuple):
    """A pass that was begun to compare ranks, for whoever asks for it next."""

    epoch: int
    start: int
    rows: Iterator[StreamRow]


class StreamLoader(Loader):
    """Every rank, and every worker process, reads the whole stream and keeps its own part of it.

    That costs each reader the whole stream's decoding, and buys an order (and, sample by sample, a
    randomness) that no number of ranks or workers changes. On resume the stream is entered by the dataset's own state,
    where it has one that leads back to the same samples; otherwise it is read from its beginning up to the position.

    A stream that splits itself by rank (`agree` finds out) is not dealt again: every rank reads its own part, and
    positions count that part's samples. `len(dataset)`, if there is one, is then taken for the part's.
    """

    def __init__(self, dataset: Any, batch: BatchPlan, plan: DataPlan, collate: Collator) -> None:
        super().__init__(dataset, batch, plan, collate)
        self._gang = Gang()
        self._own_parts = batch.world > 1 and splits_itself(dataset)
        self._compare_due = False
        self._sizes = [_size(dataset)]
        self._held: _Held | None = None
        self._stream = self._rows(self._own_parts)
        self._bookmark: Bookmark | None = None

    def agree(self, gang: Gang, position: State | None = None) -> None:
        """Find out whether the ranks read the same stream, or each a part of its own. Collective; done once.

        Args:
            position: where a resumed run will go on: it says how the samples before it were dealt. None: at the
                beginning; the pass whose first samples are compared here is the one that is read next.

        Raises:
            DataError: on all ranks: they read different samples that cannot be read again.
        """
        if gang.size == 1 or self._gang.size > 1:
            return
        self._gang = gang
        if self._own_parts or (position and position.get("parts", 1) > 1):
            self._take_own_parts(self._rows(own_parts=True))
            return
        self._compare_due = True
        if not position:
            self._held = _Held(
                self.epoch, self.consumed, self._opened(self.epoch, self.consumed, self.passes_alike)
            )

    @property
    def own_parts(self) -> bool:
        return self._own_parts

    @property
    def total_batch_size(self) -> int:
        """Samples by which a micro-batch moves the position: those of all ranks, or of this rank's own part."""
        return self.batch.micro if self._own_parts else super().total_batch_size

    @property
    def num_samples(self) -> int | None:
        if not self._own_parts:
            return super().num_samples
        sizes = [size for size in self._sizes if size is not None]
        return sum(sizes) if len(sizes) == self.batch.world else None

    def resize(self, micro: int, accumulation: int) -> None:
        super().resize(micro, accumulation)
        self._stream, self._held = self._rows(self._own_parts), None
        self._reseed(self.seed)

    def state_dict(self) -> State:
        here = belongs(self._bookmark, self.epoch, self.consumed)
        return super().state_dict() | self._parts() | {"bookmark": self._bookmark if here else None}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._bookmark = state.get("bookmark")
        then, now = int(state.get("parts", 1)), self._parts().get("parts", 1)
        if then != now:
            self.consumed, self._bookmark = self.consumed * then // now, None
            logger.warning(
                f"{type(self.dataset).__name__} was split into {then} parts by itself, and is read in {now} now: each "
                f"goes on behind its own first {self.consumed} samples. Only the stream knows which samples those are"
            )

    def _parts(self) -> State:
        return {"parts": self.batch.world} if self._own_parts else {}

    def _rows(self, own_parts: bool) -> StreamRows:
        batch = self.batch
        reader = StreamReader(
            self.dataset,
            self.collate_fn,
            self.plan,
            row=batch.micro if own_parts else batch.micro * batch.world,
            world=1 if own_parts else batch.world,
            rank=0 if own_parts else batch.rank,
        )
        return StreamRows(reader, self.plan)

    def _take_own_parts(self, stream: StreamRows) -> None:
        self._own_parts, self._stream = True, stream
        self._reseed(self.seed)
        self._sizes = self._gang.gather_objects(_size(self.dataset))

    def _length(self, epoch: int) -> int | None:
        """Samples of a pass; of several parts, those of the longest, to whose end all ranks go."""
        sizes = [size for size in self._sizes if size is not None]
        if len(sizes) < len(self._sizes):
            return None
        return max(size - size % self.total_batch_size if self.drop_last else size for size in sizes)

    def _reseed(self, seed: int) -> None:
        self._stream.reseed(seed)

    def _opened(self, epoch: int, start: int, private: bool) -> Iterator[StreamRow]:
        """The rows of a pass; where ranks are to be compared first, the first row has been read."""
        held, self._held = self._held, None
        if held is not None and (held.epoch, held.start) == (epoch, start):
            return held.rows
        if not self._compare_due:
            return self._stream.rows(epoch, start, private, self._bookmark)
        self._compare_due = False
        own = self._rows(own_parts=True)

        def begin(own_parts: bool) -> Iterator[StreamRow]:
            return (own if own_parts else self._stream).rows(epoch, start, private, self._bookmark)

        own_parts, rows = begin_together(begin, self._gang, self.dataset, may_be_empty=self.passes_alike)
        if own_parts and start:
            raise DataError(
                f"the ranks read different samples behind sample {start} of {type(self.dataset).__name__}, where the "
                "run is continued: it splits itself by rank now, and gave all samples to every rank then. Continue on "
                "one process, or let it give all samples on every rank."
            )
        if own_parts:
            self._take_own_parts(own)
        return rows

    def _groups(self, epoch: int, start: int, accumulation: int, private: bool) -> Iterator[Group]:
        rows: list[StreamRow] = []
        before = start
        # A part of an evaluation set may be empty.
        empty = contextlib.suppress(NoSampleError) if self._own_parts and self.passes_alike else _NOTHING
        with empty:
            for row in self._opened(epoch, start, private):
                rows.append(row)
                if len(rows) == accumulation or row.last:
                    self._check_size(row, start)
                    yield self._group(rows, before, epoch)
                    rows, before = [], row.end

    def _check_size(self, row: StreamRow, start: int) -> None:
        size = _size(self.dataset)
        if row.last and self._own_parts and not start and size is not None and row.end < size:
            logger.warning(
                f"{type(self.dataset).__name__} splits itself by rank: this rank read {row.end} samples, and its "
                f"__len__ says {size}. Let __len__ count this rank's samples alone: the run's length follows from it"
            )

    def _group(self, rows: list[StreamRow], before: int, epoch: int) -> Group:
        own = [row for row in rows if row.ids]
        end, last, bookmark = rows[-1].end, rows[-1].last, rows[-1].bookmark
        return Group(
            batches=[row.batch for row in own or rows],
            ids=[row.ids for row in own or rows],
            samples=0 if self._own_parts else end - before,
            epoch=epoch,
            last_in_epoch=last,
            filler=not own,
            position=self._position(epoch, end, last, None) | self._parts() | {"bookmark": bookmark},
        )

    def _moved_to(self, position: State) -> None:
        super()._moved_to(position)
        self._bookmark = position["bookmark"]


def _size(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
