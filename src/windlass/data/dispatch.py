"""One process reads, and sends every rank its part of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from windlass.core.errors import DataError
from windlass.core.trees import batch_size_of, map_leaves, tensors_in
from windlass.data.batch_reader import BatchReader, DealtBatch, PassRequest
from windlass.data.dealt_rows import share, shares_of
from windlass.data.same_stream import BegunPass, check_dispatched
from windlass.data.stream import SharedStream
from windlass.dist.gang import Gang
from windlass.dist.wire import pack, unpack

Pieces = list[Any]
_MAIN = 0


class Dispatched:
    """The main process's batches, dealt to all ranks: either one each, or (`split`) each cut into equal parts.

    Positions are those of the main process's reader. Its errors are sent to the other ranks, so that no rank waits for
    a batch that will not come.

    Args:
        reader: a reader for one rank, over the whole data.
        split: cut every batch, instead of dealing whole ones.
        drop_last: drop the last batches if they are fewer than the ranks.
        stream: what other ranks would read themselves, if it is a stream: the ranks compare its first samples once.
        slice_fn: how to cut: `slice_fn(batch, slice, process_index=, num_processes=)`; None cuts the first axis.
    """

    def __init__(
        self,
        reader: BatchReader,
        data_ranks: Gang,
        *,
        split: bool,
        drop_last: bool = False,
        stream: SharedStream | None = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> None:
        self._reader, self._data_ranks, self._drop_last = reader, data_ranks, drop_last
        self._split, self._slice = split, slice_fn or _cut
        self._per_row = 1 if split else data_ranks.size
        self._uncompared = stream
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self.unit = reader.unit
        size = reader.total_batch_size
        self.total_batch_size = None if size is None else size * self._per_row

    def read(self, wanted: PassRequest) -> Iterator[DealtBatch]:
        stream, self._uncompared = self._uncompared, None
        if stream is None or wanted.start:
            return (
                self._receive() if self._data_ranks.rank != _MAIN else self._send(self._reader.read(wanted))
            )
        if self._data_ranks.rank != _MAIN:
            first_marks = partial(stream.first_marks, wanted.epoch)
            check_dispatched(first_marks(), first_marks, self._data_ranks, stream.dataset)
            return self._receive()
        begun = BegunPass(self._reader.read(wanted))
        check_dispatched(begun.marks, list, self._data_ranks, stream.dataset)
        return self._send(begun.rows())

    def count(self, epoch: int, start: int = 0) -> int | None:
        count = self._reader.count(epoch, start)
        if count is None:
            return None
        return count // self._per_row if self._drop_last else -(-count // self._per_row)

    def position(self, epoch: int, batches: int) -> int:
        return self._reader.position(epoch, batches * self._per_row)

    def reseed(self, seed: int) -> None:
        self._reader.reseed(seed)

    def _send(self, batches: Iterator[DealtBatch]) -> Iterator[DealtBatch]:
        rows, last = self._rows(batches), False
        try:
            while not last:
                row, last, parcels = self._next(rows)
                self._send_to_all(parcels)
                if row:
                    yield replace(self._dealt(*unpack(parcels[_MAIN])), bookmark=row[-1].bookmark)
        finally:
            self._wait_for_sends()

    def _next(
        self, rows: Iterator[tuple[list[DealtBatch], bool]]
    ) -> tuple[list[DealtBatch], bool, list[torch.Tensor]]:
        try:
            row, last = next(rows, ([], True))
            return row, last, self._parcels(row, last)
        except Exception as error:
            self._send_to_all(
                [pack(None, {"error": f"{type(error).__name__}: {error}"})] * self._data_ranks.size
            )
            raise

    def _rows(self, reading: Iterator[DealtBatch]) -> Iterator[tuple[list[DealtBatch], bool]]:
        """The batches of one row, and True for the last row; reads one row ahead."""
        row = self._row(reading)
        while row:
            following = self._row(reading)
            yield row, not following
            row = following

    def _row(self, reading: Iterator[DealtBatch]) -> list[DealtBatch]:
        row = list(islice(reading, self._per_row))
        return [] if self._drop_last and len(row) < self._per_row else row

    def _parcels(self, row: list[DealtBatch], last: bool) -> list[torch.Tensor]:
        """The message for each rank; one without shares means that there is no batch at all."""
        if not row:
            return [pack(None, {"shares": []})] * self._data_ranks.size
        pieces, shares = self._cut(row[0]) if self._split else self._deal(row)
        notes = {"shares": shares, "end": row[-1].end, "last": last}
        try:
            return [pack(piece, notes, "batch") for piece in pieces]
        except DataError as error:
            raise DataError(f"{error}, or let every rank read for itself: dispatch_batches=False") from None

    def _deal(self, row: list[DealtBatch]) -> tuple[Pieces, list[int]]:
        idle = self._data_ranks.size - len(row)
        sizes = [batch_size_of(dealt.batch) or sum(dealt.shares) for dealt in row]
        return [dealt.batch for dealt in row] + [row[0].batch] * idle, sizes + [0] * idle

    def _cut(self, whole: DealtBatch) -> tuple[Pieces, list[int]]:
        count, ranks = batch_size_of(whole.batch), self._data_ranks.size
        if count is None:
            raise DataError(
                "split_batches=True cuts the first axis of a batch's tensors, and this batch has none. Let whole "
                "batches be dealt instead: split_batches=False."
            )
        pieces = []
        for rank in range(ranks):
            low, high = share(count, ranks, rank)
            part = slice(low, high) if high > low else slice(0, 1)  # the latter for a filler
            pieces.append(self._slice(whole.batch, part, process_index=rank, num_processes=ranks))
        return pieces, list(shares_of(count, ranks))

    def _send_to_all(self, parcels: list[torch.Tensor]) -> None:
        self._wait_for_sends()  # only now: the last row was sent while this rank computed with it
        group = self._data_ranks.host_group
        for rank, parcel in enumerate(parcels):
            if rank != _MAIN:
                # The size first: a receiver has to allocate the memory.
                for content in (torch.tensor([parcel.numel()]), parcel):
                    self._under_way.append((dist.isend(content, group=group, group_dst=rank), content))

    def _wait_for_sends(self) -> None:
        """Wait for the messages under way: one is lost if its work object is dropped."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _receive(self) -> Iterator[DealtBatch]:
        group = self._data_ranks.host_group
        while True:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, group=group, group_src=_MAIN)
            parcel = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(parcel, group=group, group_src=_MAIN)
            batch, notes = unpack(parcel)
            if "error" in notes:
                raise DataError(f"the main process failed while reading data for all ranks: {notes['error']}")
            if not notes["shares"]:
                return
            yield self._dealt(batch, notes)
            if notes["last"]:
                return

    def _dealt(self, batch: Any, notes: dict[str, Any]) -> DealtBatch:
        shares = tuple(notes["shares"])
        return DealtBatch(
            batch, shares, notes["end"], notes["last"], filler=not shares[self._data_ranks.rank]
        )


def _cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
    """Slice the first axis of every tensor and array, and lists with one entry per sample.

    Other values are sent to all ranks. Raises DataError for tensors whose first axes differ.
    """
    # A list of another length is one value for the batch, such as names of classes.
    count = batch_size_of(batch)

    def has_rows(piece: Any) -> bool:
        if isinstance(piece, torch.Tensor | np.ndarray):
            if piece.ndim > 0 and len(piece) != count:
                raise DataError(
                    f"split_batches=True cuts the first axis of all tensors of a batch, here of {count} samples, and "
                    f"one has the shape {list(piece.shape)}: each rank would get another part of it. Let whole batches "
                    "be dealt instead (split_batches=False), or cut them yourself (slice_fn_for_dispatch)"
                )
            return piece.ndim > 0
        return isinstance(piece, list) and len(piece) == count and next(tensors_in(piece), None) is None

    return map_leaves(lambda piece: piece[part], batch, has_rows)
