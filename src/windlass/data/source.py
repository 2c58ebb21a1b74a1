"""Where collated batches come from: this process, or worker processes that read ahead. The batches are the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from windlass.config.plan import DataPlan
from windlass.data.pin import pin, wants_pinning
from windlass.data.workers import Reader, TaskBoard, read_batches

Task = list[int]
_SHOWN = 8  # samples that a message lists


class Tasks(Protocol):
    """Whatever says which samples make which batches."""

    @property
    def batches(self) -> list[Task]: ...


class Fetching(Protocol):
    """Reads and collates the samples of one task, in any process; `Fetch` is the usual one."""

    def __call__(self, epoch: int, ids: list[int], isolate: bool = True) -> Any: ...

    def reseed(self, seed: int) -> None: ...


TasksT = TypeVar("TasksT", bound=Tasks)


class Source:
    """Turns each update's cut into its collated batches, in order."""

    def __init__(self, fetch: Fetching, plan: DataPlan) -> None:
        self.fetch, self._plan = fetch, plan
        self._pool: WorkerPool | None = None

    def batches(
        self, epoch: int, cuts: Iterator[TasksT], private: bool, resumed: bool = False
    ) -> Iterator[tuple[TasksT, list[Any]]]:
        """Each of `cuts` with its batches.

        Args:
            epoch: goes into the seeds.
            cuts: which samples make which batch.
            private: a look at the data from outside training; must disturb neither training's workers nor
                Python's generator.
            resumed: the first cut was read before, by the run that is continued, which left its mark on Python's
                generator then; it must leave none now.
        """
        if self._plan.workers == 0:
            return self._in_process(epoch, cuts, private, resumed)
        if private:
            return WorkerPool(self.fetch, self._plan, persistent=False).run(epoch, cuts)
        if self._pool is None:
            self._pool = WorkerPool(self.fetch, self._plan, persistent=self._plan.persistent_workers)
        return self._pool.run(epoch, cuts)

    def reseed(self, seed: int) -> None:
        """Read with another seed from now on; workers that hold the old one are let go."""
        self.fetch.reseed(seed)
        self._pool = None

    def _in_process(
        self, epoch: int, cuts: Iterator[TasksT], private: bool, resumed: bool
    ) -> Iterator[tuple[TasksT, list[Any]]]:
        fetch, pinned, isolate = self.fetch, wants_pinning(self._plan.pin_memory), private or resumed
        for cut in cuts:
            batches = [fetch(epoch, ids, isolate) for ids in cut.batches]
            isolate = private
            yield cut, pin(batches) if pinned else batches


class WorkerPool:
    """Worker processes, one micro-batch a task, through PyTorch's `DataLoader`, whose queues and signals are proven."""

    def __init__(self, fetch: Fetching, plan: DataPlan, persistent: bool) -> None:
        self._queue, self._board = _Queue(), TaskBoard(plan.workers)
        self._loader: DataLoader[Any] = DataLoader(
            _Tasks(fetch, self._board), sampler=self._queue, **worker_options(plan, persistent)
        )
        self._under_way: dict[int, tuple[int, Task]] = {}
        self._reader = Reader(plan.purpose, plan.start_timeout, self._task_of)

    def run(self, epoch: int, cuts: Iterator[TasksT]) -> Iterator[tuple[TasksT, list[Any]]]:
        waiting: deque[TasksT] = deque()
        under_way = self._under_way
        under_way.clear()

        def tasks() -> Iterator[tuple[int, int, Task]]:
            number = 0
            for cut in cuts:
                waiting.append(cut)  # workers read ahead of whoever takes the groups
                for ids in cut.batches:
                    under_way[number] = epoch, ids
                    yield number, epoch, ids
                    number += 1

        def batches() -> Iterator[tuple[int, Any]]:
            for number, batch in read_batches(self._loader, self._reader):
                under_way.pop(number, None)
                yield number, batch

        self._board.clear()
        self._queue.tasks = tasks()
        stream = in_order(batches())
        for first in stream:
            cut = waiting.popleft()
            yield cut, [first, *islice(stream, len(cut.batches) - 1)]

    def _task_of(self, worker: int) -> str:
        number = self._board.task_of(worker)
        if number not in self._under_way:
            return ""
        epoch, ids = self._under_way[number]
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        return f"samples {ids[:_SHOWN]}{more} (epoch {epoch})"


def worker_options(plan: DataPlan, persistent: bool) -> dict[str, Any]:
    """Arguments of a `DataLoader` that hands on what its workers give, one item a task."""
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
        # Its own, because otherwise every pass would draw from the program's default generator.
        "generator": torch.Generator().manual_seed(plan.seed),
    }
    if plan.prefetch_factor is not None:
        options["prefetch_factor"] = plan.prefetch_factor
    return options


def in_order(numbered: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    """Undo the shuffling of `in_order=False`: workers need not wait for a slow one, and still the order is
    what it always is.
    """
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
    """The tasks of the coming pass, as the sampler of a `DataLoader`, which must exist before they do."""

    tasks: Iterable[tuple[int, int, Task]] = ()

    def __iter__(self) -> Iterator[tuple[int, int, Task]]:
        return iter(self.tasks)


class _Tasks(Dataset[Any]):
    """What a worker runs: a task in, a numbered batch out."""

    def __init__(self, fetch: Fetching, board: TaskBoard) -> None:
        self._fetch, self._board = fetch, board

    def __getitem__(self, task: tuple[int, int, Task]) -> tuple[int, Any]:
        number, epoch, ids = task
        self._board.take(number)
        return number, self._fetch(epoch, ids, False)
