"""One process's part of a batch sampler or a stream, for scripts that deal data out by hand.

Prepared loaders do not use these: they divide the tail, while these repeat samples from the beginning, as scripts
expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from windlass.core.errors import ConfigError, Problem
from windlass.data.seeding import set_epochs


class BatchSamplerShard(BatchSampler):
    """The batches of one process out of those that a batch sampler yields.

    Args:
        batch_sampler: yields lists of positions. Without `drop_last`, batches that are missing or short at the end are
            completed with the first samples.
        num_processes, process_index: between how many processes, and which of them this is.
        split_batches: cut every batch between the processes; otherwise deal whole batches in turn.
        even_batches: complete the last batches; otherwise processes may have fewer batches, or short ones.

    Raises:
        ConfigError: `split_batches` with a batch size that the processes do not divide.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            _refuse_uneven_split(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """Batches of `batch_sampler`, before they are divided among processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        whole, left = divmod(len(self.batch_sampler), self.num_processes)
        if self.drop_last or not left:
            return whole
        return whole + (self.even_batches or self.process_index < left)

    def __iter__(self) -> Iterator[list[int]]:
        batches, per_row = iter(self.batch_sampler), 1 if self.split_batches else self.num_processes
        first: list[list[int]] = []
        while row := list(islice(batches, per_row)):
            first = first or row
            # Only the last batch of a sampler can be short.
            if len(row) == per_row and self.batch_size in (None, len(row[-1])):
                yield self._own(row)
            elif not self.drop_last:
                yield from self._own_of_last(row, first)

    def _own(self, row: list[list[int]]) -> list[int]:
        if not self.split_batches:
            return row[self.process_index]
        part = self.batch_size // self.num_processes
        return row[0][part * self.process_index : part * (self.process_index + 1)]

    def _own_of_last(self, row: list[list[int]], first: list[list[int]]) -> Iterator[list[int]]:
        if self.even_batches:
            yield self._own(self._completed(row, first))
        elif self.split_batches:
            # A part of a short batch may be empty, which is not a batch.
            yield from filter(None, [self._own(row)])
        else:
            yield from row[self.process_index : self.process_index + 1]

    def _completed(self, row: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        if self.batch_size is None:
            return list(islice(chain(row, cycle(first)), self.num_processes))
        samples = chain(*row, cycle(list(chain(*first))))
        count = 1 if self.split_batches else self.num_processes
        return [list(islice(samples, self.batch_size)) for _ in range(count)]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of a stream that every process reads.

    Args:
        dataset: yields the same samples on every process.
        batch_size: samples of a batch of one process, or (`split_batches`) of all.
        drop_last: leave out a last, short batch of all processes; otherwise it is completed with the first samples.
        num_processes, process_index: between how many processes, and which of them this is.

    Raises:
        ConfigError: `split_batches` with a batch size that the processes do not divide.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            _refuse_uneven_split(batch_size, num_processes)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches = split_batches

    @property
    def _row(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Pass `epoch` on to the dataset, if it has epochs."""
        self.epoch = epoch
        set_epochs(epoch, self.dataset)

    def __len__(self) -> int:
        rows, left = divmod(len(self.dataset), self._row)
        return (rows + bool(left and not self.drop_last)) * (self._row // self.num_processes)

    def samples(self) -> Iterator[Any]:
        """The samples of all processes, from the first one on."""
        return iter(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        row, part = self._row, self._row // self.num_processes
        samples, first = self.samples(), list[Any]()
        while taken := list(islice(samples, row)):
            first = first or taken
            if len(taken) < row:
                if self.drop_last:
                    return
                taken = list(islice(chain(taken, cycle(first)), row))
            yield from taken[part * self.process_index : part * (self.process_index + 1)]


def _refuse_uneven_split(batch_size: int | None, processes: int) -> None:
    if batch_size is None or batch_size % processes:
        fix = f"choose a multiple of the {processes} processes, or split_batches=False"
        raise ConfigError(Problem("batch_size", batch_size, fix))
