"""Reading datasets that can only be iterated, with an order that depends on neither ranks nor workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from windlass.config.plan import DataPlan
from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_COLLATE, derive_seed
from windlass.core.types import Collator
from windlass.data.bookmark import WITNESSES, Bookmark, StreamPlace, belongs, marks_of, why_read_again
from windlass.data.cut import share
from windlass.data.pin import pin, wants_pinning
from windlass.data.reading import Reading, open_reading
from windlass.data.same_stream import NoSampleError
from windlass.data.seeding import Sandbox, collator_reseeder
from windlass.data.source import in_order, worker_options
from windlass.data.workers import Reader, read_batches

logger = get_logger(__name__)


@dataclass(slots=True)
class StreamRow:
    """One micro-batch of every rank, seen from this rank.

    Attributes:
        ids: positions of this rank's samples in the stream; empty where the stream ended before its turn.
        batch: the collated samples; the row's first sample alone where this rank has none.
        end: samples consumed over all ranks once this row is done.
        last: the stream ends here.
        marks: in the first row of a pass, checksums of its first samples, by which ranks tell whether they read the
            same stream.
        bookmark: by which a later pass can be entered behind this row; None in the last row, and where nobody asked.
    """

    ids: list[int]
    batch: Any
    end: int
    last: bool
    marks: list[int]
    bookmark: Bookmark | None = None

    def pin_memory(self) -> StreamRow:
        self.batch = pin(self.batch)
        return self


@dataclass(slots=True)
class _Raw:
    """A row before collation: of a whole row only this rank's samples are kept, and the first few.

    `place` is where the dataset stood behind it.
    """

    ids: list[int]
    samples: list[Any]
    head: list[Any]
    first: int
    end: int
    place: StreamPlace | None


class StreamRows:
    """The rows of a stream, read in this process or by workers, which changes nothing about them."""

    def __init__(self, reader: StreamReader, plan: DataPlan) -> None:
        self._reader, self._plan = reader, plan
        self._pool: DataLoader[Any] | None = None

    def rows(
        self, epoch: int, start: int, private: bool, bookmark: Bookmark | None = None
    ) -> Iterator[StreamRow]:
        """Rows of `epoch` from sample `start` on, with bookmarks; entered by `bookmark` where it was made there.

        A `private` pass leaves the lasting workers alone, and makes no bookmarks.
        """
        if not private:
            self._say_cost(epoch, start, bookmark)
        if private or not belongs(bookmark, epoch, start):
            bookmark = None
        if self._plan.workers == 0:
            pinned = wants_pinning(self._plan.pin_memory)
            for _, row in self._reader.rows(epoch, start, 0, 1, bookmark, keep=not private):
                yield row.pin_memory() if pinned else row
            return
        if private or self._pool is None or bookmark is not None:
            stream = _WorkerStream(self._reader, bookmark, keep=not private)
            persistent = self._plan.persistent_workers and not private
            pool: DataLoader[Any] = DataLoader(stream, **worker_options(self._plan, persistent))
            if not private:
                self._pool = pool
        else:
            pool = self._pool
        pool.dataset.seek(epoch, start)  # type: ignore[attr-defined]
        task = f"the stream {type(self._reader.dataset).__name__} (epoch {epoch}, from sample {start} on)"
        reader = Reader(self._plan.purpose, self._plan.start_timeout, lambda worker: task)
        yield from in_order(read_batches(pool, reader))

    def _say_cost(self, epoch: int, start: int, bookmark: Bookmark | None) -> None:
        reason = why_read_again(self._reader.dataset, bookmark, epoch, start)
        if reason:
            name = type(self._reader.dataset).__name__
            logger.warning(
                f"reading {start} samples of the stream again, to continue behind them: {name} cannot be entered "
                f"there, because {reason}"
            )

    def reseed(self, seed: int) -> None:
        """Read with another seed from now on; workers that hold the old one are let go."""
        self._reader.seed = seed
        self._pool = None


class StreamReader:
    """Cuts a stream into rows and collates this rank's part of them. Always seeds: a sample passed by cannot
    be read again.

    Args:
        row: samples of a row, over all ranks.
        may_be_empty: it is no error if a pass has no row, as one that begins behind the stream's end.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collator,
        plan: DataPlan,
        *,
        row: int,
        world: int,
        rank: int,
        may_be_empty: bool = False,
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._row, self._world, self._rank = row, world, rank
        self._may_be_empty = may_be_empty
        self._drop_last = plan.drop_last
        self.seed = plan.seed
        self._sandbox = Sandbox()

    def rows(
        self,
        epoch: int,
        start: int,
        worker: int,
        workers: int,
        bookmark: Bookmark | None = None,
        keep: bool = False,
    ) -> Iterator[tuple[int, StreamRow]]:
        """Rows `worker`, `worker + workers`, ... of `epoch` from sample `start` on, numbered.

        Args:
            bookmark: saves reading the samples before `start`, where it was made there.
            keep: give each row a bookmark.
        """
        reading = open_reading(
            self.dataset,
            self._sandbox,
            self.seed,
            epoch,
            start,
            stretch=self._row,
            bookmark=bookmark,
            say=worker == 0,
        )
        raws = enumerate(self._raw_rows(reading, start, keep)) if reading else iter(())
        number, raw = next(raws, (0, None))
        if raw is None:
            if self._may_be_empty:
                return
            raise NoSampleError(self._nothing(epoch, start))
        while raw is not None:
            # Known before this row is handed out: an update must know that it is the last.
            following_number, following = next(raws, (0, None))
            if number % workers == worker:
                marks = marks_of(raw.head) if number == 0 else []
                yield number, self._collated(raw, epoch, marks, following)
            number, raw = following_number, following

    def _nothing(self, epoch: int, start: int) -> str:
        name = type(self.dataset).__name__
        if start:
            return (
                f"the stream ({name}) ends at or before sample {start}, where training was to continue: "
                "it is not the same stream."
            )
        if epoch:
            return can_be_read_once(name, epoch)
        short = " or shorter than one batch (dataloader_drop_last=True)" if self._drop_last else ""
        return f"the stream ({name}) is empty{short}."

    def _raw_rows(self, reading: Reading, start: int, keep: bool) -> Iterator[_Raw]:
        size, position = self._row, start
        while samples := reading.take(size):
            if len(samples) < size and self._drop_last:
                return
            yield self._own(samples, position, reading.place() if keep else None)
            position += len(samples)
            if len(samples) < size:
                return

    def _own(self, samples: list[Any], position: int, place: StreamPlace | None) -> _Raw:
        low, high = share(len(samples), self._world, self._rank)
        ids = list(range(position + low, position + high))
        own, head = samples[low:high] or samples[:1], samples[:WITNESSES]
        return _Raw(ids, own, head, position, position + len(samples), place)

    def _collated(self, raw: _Raw, epoch: int, marks: list[int], following: _Raw | None) -> StreamRow:
        bookmark = None
        if raw.place is not None and following is not None:
            bookmark = raw.place.bookmark(epoch, raw.end, following.head)
        first = raw.ids[0] if raw.ids else raw.first
        with self._sandbox:
            self._sandbox.seed(derive_seed(STREAM_COLLATE, self.seed, epoch, first))
            reseed = collator_reseeder(self._collate)
            if reseed is not None:
                reseed(epoch, first)
            try:
                batch = self._collate(raw.samples)
            except Exception as error:
                error.add_note(f"raised while collating the samples {raw.ids[:16]} of the stream")
                raise
        return StreamRow(raw.ids, batch, raw.end, following is None, marks, bookmark)


def can_be_read_once(name: str, epoch: int) -> str:
    """What is wrong with a stream that had samples, and has none in a later pass."""
    return (
        f"the stream ({name}) gave no sample in epoch {epoch}. A generator or iterator can be read once only: pass an "
        "object whose __iter__ begins anew, or train for one epoch."
    )


class _WorkerStream(IterableDataset[Any]):
    """What a worker iterates: its rows of the pass that `seek` chose."""

    def __init__(self, reader: StreamReader, bookmark: Bookmark | None, keep: bool) -> None:
        self._reader, self._bookmark, self._keep = reader, bookmark, keep
        # Shared memory: a persistent worker keeps the copy of this object that it was started with.
        self._at = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._place: tuple[int, int] | None = None

    def seek(self, epoch: int, start: int) -> None:
        self._at[0], self._at[1] = epoch, start

    def __iter__(self) -> Iterator[tuple[int, StreamRow]]:
        if self._place is None:
            info = get_worker_info()
            assert info is not None
            self._place = info.id, info.num_workers
            _hide_worker()
        epoch, start = self._at.tolist()
        return self._reader.rows(epoch, start, *self._place, self._bookmark, self._keep)


def _hide_worker() -> None:
    """Make `get_worker_info()` None here: a dataset that sees it would keep a part of the stream, and parts
    are dealt by rows.
    """
    from torch.utils.data._utils import worker

    worker._worker_info = None
