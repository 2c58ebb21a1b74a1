"""Collated batches, read in this process or by worker processes that read ahead. The batches are the same."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from windlass.config.plan import DataPlan
from windlass.data.batch_reader import DealtBatch, wants_pinning
from windlass.data.fetch import Fetching, read_here
from windlass.data.workers import Reader, TaskBoard, read_batches

_SHOWN = 8  # samples that a message lists
# Number, epoch, and the samples of a `DealtBatch`: its `ids` and `repeats`.
_Task = tuple[int, int, list[int], list[int]]


class Source:
    """Turns tasks into collated batches, in order."""

    def __init__(self, fetch: Fetching, plan: DataPlan) -> None:
        self.fetch, self._plan = fetch, plan
        self._pool: WorkerPool | None = None
        self._idle: WorkerPool | None = None  # persistent workers of private passes, between two of them

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None, "_idle": None}  # a copy starts worker processes of its own

    def batches(
        self, epoch: int, tasks: Iterator[DealtBatch], private: bool, isolated: int = 0
    ) -> Iterator[DealtBatch]:
        """The tasks, with their data read.

        Args:
            epoch: part of the seeds.
            tasks: batches of which only the samples are known.
            private: use separate workers, and leave Python's generator unchanged. Otherwise two numbers are drawn from
                it for each batch, also for those of workers: a run may be resumed with another number of them.
            isolated: leave Python's generator unchanged during the first so many batches. The run that is resumed has
                read them already, and its draws are part of the generator's saved state.
        """
        if self._plan.workers == 0:
            isolated_here = math.inf if private else isolated
            return read_here(self.fetch, epoch, tasks, isolated_here, wants_pinning(self._plan.pin_memory))
        if private:
            return self._private(epoch, tasks)
        if self._pool is None:
            self._pool = WorkerPool(self.fetch, self._plan, persistent=self._plan.persistent_workers)
        return _drawing(self._pool.run(epoch, tasks), isolated)

    def reseed(self, seed: int) -> None:
        """Read with another seed from now on; workers that hold the old one are released."""
        self.fetch.reseed(seed)
        self._pool = self._idle = None

    def _private(self, epoch: int, tasks: Iterator[DealtBatch]) -> Iterator[DealtBatch]:
        """Persistent workers are kept for the next private pass once all batches are read; passes at the same time
        have workers of their own.
        """
        persistent = self._plan.persistent_workers
        pool, self._idle = self._idle or WorkerPool(self.fetch, self._plan, persistent), None
        yield from pool.run(epoch, tasks)
        # Not in a `finally`: the workers of a pass that was left have tasks of it under way.
        self._idle = pool if persistent else None


def _drawing(batches: Iterator[DealtBatch], isolated: int) -> Iterator[DealtBatch]:
    """The batches, with the draws of `Fetch` in this process before all but the first `isolated`."""
    for number, batch in enumerate(batches):
        if number >= isolated:
            random.random()
            random.random()
        yield batch


class WorkerPool:
    """Worker processes behind PyTorch's `DataLoader`, one batch per task."""

    def __init__(self, fetch: Fetching, plan: DataPlan, persistent: bool) -> None:
        self._queue, self._board = _Queue(), TaskBoard(plan.workers)
        self._loader: DataLoader[Any] = DataLoader(
            _Tasks(fetch, self._board), sampler=self._queue, **worker_options(plan, persistent)
        )
        self._under_way: dict[int, tuple[int, DealtBatch]] = {}
        task_of = partial(_task_of, self._board, self._under_way)
        self._reader = Reader(plan.purpose, plan.start_timeout, task_of)

    def run(self, epoch: int, tasks: Iterator[DealtBatch]) -> Iterator[DealtBatch]:
        under_way = self._under_way
        under_way.clear()

        def queued() -> Iterator[_Task]:
            for number, task in enumerate(tasks):
                under_way[number] = epoch, task
                yield number, epoch, task.ids, task.repeats

        def received() -> Iterator[tuple[int, DealtBatch]]:
            for number, batch in read_batches(self._loader, self._reader):
                _, task = under_way.pop(number)
                task.batch = batch
                yield number, task

        self._board.clear()
        self._queue.tasks = queued()
        return in_order(received())


def _task_of(board: TaskBoard, under_way: Mapping[int, tuple[int, DealtBatch]], worker: int) -> str:
    """Describe what a worker reads now; empty if it is unknown."""
    number = board.task_of(worker)
    if number not in under_way:
        return ""
    epoch, task = under_way[number]
    more = f" and {len(task.ids) - _SHOWN} more" if len(task.ids) > _SHOWN else ""
    return f"samples {task.ids[:_SHOWN]}{more} (epoch {epoch})"


def worker_options(plan: DataPlan, persistent: bool) -> dict[str, Any]:
    """Arguments of a `DataLoader` that yields what its workers return, one item per task."""
    options: dict[str, Any] = {
        "batch_size": None,
        "collate_fn": _unchanged,
        "num_workers": plan.workers,
        "pin_memory": wants_pinning(plan.pin_memory),
        "persistent_workers": persistent,
        "multiprocessing_context": plan.multiprocessing_context,
        "in_order": plan.in_order,
        "worker_init_fn": plan.worker_init,
        "timeout": plan.worker_timeout,
        # Without it every pass would draw from the program's default generator.
        "generator": torch.Generator().manual_seed(plan.seed),
    }
    if plan.prefetch_factor is not None:
        options["prefetch_factor"] = plan.prefetch_factor
    return options


def in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    """Sort items by number as they arrive, so that `in_order=False` does not change the order of batches."""
    early: dict[int, Any] = {}
    due = 0
    for number, batch in numbered:
        early[number] = batch
        while due in early:
            yield early.pop(due)
            due += 1


def _unchanged(item: Any) -> Any:
    return item


class _Queue:
    """The tasks of the next pass, as the sampler of a `DataLoader`, which must be constructed before they exist."""

    tasks: Iterable[_Task] = ()

    def __iter__(self) -> Iterator[_Task]:
        return iter(self.tasks)


class _Tasks(Dataset[Any]):
    """Runs in a worker: maps a task to a numbered batch."""

    def __init__(self, fetch: Fetching, board: TaskBoard) -> None:
        self._fetch, self._board = fetch, board

    def __getitem__(self, task: _Task) -> tuple[int, Any]:
        number, epoch, ids, repeats = task
        self._board.take(number)
        return number, self._fetch(epoch, ids, False, repeats)
