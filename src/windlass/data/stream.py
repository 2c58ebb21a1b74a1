"""Streams: datasets that can only be iterated. Their order depends on neither the number of ranks nor of workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from windlass.config.plan import DataPlan
from windlass.core.logs import get_logger
from windlass.core.rng import STREAM_COLLATE, derive_seed
from windlass.core.types import Collator
from windlass.data.batch_reader import DealtBatch, PassRequest, wants_pinning
from windlass.data.bookmark import WITNESSES, Bookmark, StreamPlace, belongs, marks_of, why_read_again
from windlass.data.dealt_rows import share, shares_of
from windlass.data.order import known_length
from windlass.data.reading import Reading, open_reading
from windlass.data.same_stream import NoSampleError
from windlass.data.seeding import Sandbox, collator_reseeder
from windlass.data.source import in_order, worker_options
from windlass.data.workers import Reader, read_batches

logger = get_logger(__name__)


class SharedStream:
    """Batches of a stream that every rank, and every worker process, reads as a whole, keeping its part of each row.

    That costs each reader the decoding of the whole stream. In return, no number of ranks or workers changes the order
    or, sample by sample, the randomness.

    Args:
        cutter: cuts this rank's part of each row.
        plan: the workers.
        may_be_empty: a pass without a batch is not an error, unless the stream had samples in an earlier pass.
    """

    unit = "samples"

    def __init__(self, cutter: RowCutter, plan: DataPlan, *, may_be_empty: bool = False) -> None:
        self.dataset, self.total_batch_size = cutter.dataset, cutter.row
        self._cutter, self._plan, self._may_be_empty = cutter, plan, may_be_empty
        self._pool: DataLoader[Any] | None = None
        self._idle: DataLoader[Any] | None = None  # persistent workers of private passes, between two of them
        self._held: tuple[tuple[int, int], Iterator[DealtBatch]] | None = None
        self._had_samples = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_pool": None,
            "_idle": None,
            "_held": None,
        }  # a copy reads with workers of its own

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        # Used once: another pass may begin at the same place.
        held, self._held = self._held, None
        epoch, start, bookmark, private, _ = wanted
        if held is not None and held[0] == (epoch, start):
            yield from held[1]
            return
        if not private:
            self._log_cost(epoch, start, bookmark)
        if private or not belongs(bookmark, epoch, start):
            bookmark = None
        empty = True
        for row in self._rows(epoch, start, bookmark, private):
            empty, self._had_samples = False, True
            yield row
        if empty and (not self._may_be_empty or (self._had_samples and not start)):
            raise NoSampleError(self._nothing(epoch, start))

    def hold(self, begun: PassRequest, rows: Iterator[DealtBatch]) -> None:
        """Keep the rows of a pass that was begun, for the next `read` from the same position."""
        self._held = (begun.epoch, begun.start), rows

    def first_marks(self, epoch: int) -> list[int]:
        """Checksums of the first samples of a pass, read in this process; empty if they cannot be read."""
        with contextlib.suppress(Exception):
            reading = open_reading(self.dataset, Sandbox(), self._cutter.seed, epoch, 0, stretch=WITNESSES)
            return marks_of(reading.take(WITNESSES)) if reading else []
        return []

    def _rows(self, epoch: int, start: int, bookmark: Bookmark | None, private: bool) -> Iterator[DealtBatch]:
        if self._plan.workers == 0:
            pinned = wants_pinning(self._plan.pin_memory)
            # No checkpoint is written of a private pass, so its rows need no bookmarks.
            for _, row in self._cutter.rows(epoch, start, 0, 1, bookmark, keep=not private):
                yield row.pin_memory() if pinned else row
            return
        pool = self._idle if private else self._pool
        self._idle = None if private else self._idle  # passes at the same time have workers of their own
        # Running workers hold the bookmark that they were started with.
        if pool is None or bookmark is not None:
            stream = _WorkerStream(self._cutter, bookmark, keep=not private)
            pool = DataLoader(stream, **worker_options(self._plan, self._plan.persistent_workers))
            if not private:
                self._pool = pool
        pool.dataset.seek(epoch, start)  # type: ignore[attr-defined]
        task = f"the stream {type(self.dataset).__name__} (epoch {epoch}, from sample {start} on)"
        reader = Reader(self._plan.purpose, self._plan.start_timeout, lambda worker: task)
        yield from in_order(read_batches(pool, reader))
        if private and self._plan.persistent_workers:
            self._idle = pool

    def _log_cost(self, epoch: int, start: int, bookmark: Bookmark | None) -> None:
        reason = why_read_again(self.dataset, bookmark, epoch, start)
        if reason:
            logger.warning(
                f"reading {start} samples of the stream again, to continue after them: {type(self.dataset).__name__} "
                f"cannot be entered there, because {reason}"
            )

    def _nothing(self, epoch: int, start: int) -> str:
        name = type(self.dataset).__name__
        if start:
            return (
                f"the stream ({name}) ends at or before sample {start}, where training was to continue: "
                "it is not the same stream."
            )
        if epoch:
            return (
                f"the stream ({name}) gave no sample in epoch {epoch}. A generator or iterator can be read once only: "
                "pass an object whose __iter__ begins again, or train for one epoch."
            )
        short = " or shorter than one batch (dataloader_drop_last=True)" if self._plan.drop_last else ""
        return f"the stream ({name}) is empty{short}."

    def count(self, epoch: int, start: int = 0) -> int | None:
        samples = known_length(self.dataset)
        if samples is None:
            return None
        left, size = max(samples - start, 0), self.total_batch_size
        return left // size if self._plan.drop_last else -(-left // size)

    def position(self, epoch: int, batches: int) -> int:
        return batches * self.total_batch_size

    def reseed(self, seed: int) -> None:
        """Read with another seed from now on; workers that hold the old one are released."""
        self._cutter.seed = seed
        self._pool = self._idle = None


@dataclass(slots=True)
class _Raw:
    """A row before collation: this rank's samples, and the first few of all ranks'.

    `place` is the dataset's state after it.
    """

    ids: list[int]
    samples: list[Any]
    head: list[Any]
    first: int
    end: int
    place: StreamPlace | None


class RowCutter:
    """Cuts a stream into rows and collates this rank's part of them.

    Always seeds, because a sample cannot be read a second time.

    Attributes:
        row: samples of a row, over all ranks.
        seed: of collation; at first that of the plan.

    Args:
        plan: seed and `drop_last`.
        ranks, rank: between how many ranks rows are dealt, and which of them this is; one for a part of its own.
    """

    def __init__(
        self, dataset: Any, collate: Collator, plan: DataPlan, row: int, ranks: int, rank: int
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self.row, self._ranks, self._rank = row, ranks, rank
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
    ) -> Iterator[tuple[int, DealtBatch]]:
        """Rows `worker`, `worker + workers`, ... of `epoch` from sample `start` on, numbered.

        Args:
            bookmark: saves reading the samples before `start`, if it was made there.
            keep: give each row a bookmark.
        """
        reading = open_reading(
            self.dataset,
            self._sandbox,
            self.seed,
            epoch,
            start,
            stretch=self.row,
            bookmark=bookmark,
            log=worker == 0,
        )
        raws = enumerate(self._raw_rows(reading, start, keep)) if reading else iter(())
        number, raw = next(raws, (0, None))
        while raw is not None:
            # Read before this row is returned: an update must know that it is the last.
            following_number, following = next(raws, (0, None))
            if number % workers == worker:
                marks = marks_of(raw.head) if number == 0 else []
                yield number, self._collated(raw, epoch, marks, following)
            number, raw = following_number, following

    def _raw_rows(self, reading: Reading, start: int, keep: bool) -> Iterator[_Raw]:
        size, position = self.row, start
        while samples := reading.take(size):
            if len(samples) < size and self._drop_last:
                return
            yield self._own(samples, position, reading.place() if keep else None)
            position += len(samples)
            if len(samples) < size:
                return

    def _own(self, samples: list[Any], position: int, place: StreamPlace | None) -> _Raw:
        low, high = share(len(samples), self._ranks, self._rank)
        ids = list(range(position + low, position + high))
        own, head = samples[low:high] or samples[:1], samples[:WITNESSES]
        return _Raw(ids, own, head, position, position + len(samples), place)

    def _collated(self, raw: _Raw, epoch: int, marks: list[int], following: _Raw | None) -> DealtBatch:
        bookmark = None
        if raw.place is not None and following is not None:
            bookmark = raw.place.bookmark(epoch, raw.end, following.head)
        # As a dataset with `__getitem__` is seeded: by the first sample of this rank's part.
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
        return DealtBatch(
            batch,
            shares_of(raw.end - raw.first, self._ranks),
            raw.end,
            following is None,
            raw.ids,
            bookmark,
            filler=not raw.ids,
            marks=marks,
        )


class _WorkerStream(IterableDataset[Any]):
    """What a worker iterates: its rows of the pass that `seek` selected."""

    def __init__(self, cutter: RowCutter, bookmark: Bookmark | None, keep: bool) -> None:
        self._cutter, self._bookmark, self._keep = cutter, bookmark, keep
        # Shared memory: a persistent worker keeps the copy of this object that it was started with.
        self._at = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._place: tuple[int, int] | None = None

    def seek(self, epoch: int, start: int) -> None:
        self._at[0], self._at[1] = epoch, start

    def __iter__(self) -> Iterator[tuple[int, DealtBatch]]:
        if self._place is None:
            info = get_worker_info()
            assert info is not None
            self._place = info.id, info.num_workers
            _hide_worker()
        epoch, start = self._at.tolist()
        return self._cutter.rows(epoch, start, *self._place, self._bookmark, self._keep)


def _hide_worker() -> None:
    """Make `get_worker_info()` return None here: a dataset that sees it would keep a part of the stream, and rows are
    dealt to workers already.
    """
    from torch.utils.data._utils import worker

    worker._worker_info = None
