"""Read a `DataLoader` that has worker processes: how they start, and the error if one of them dies.

Every loader is read through here: the Trainer's, an evaluation's, prepared loaders and those that a script made.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext, ForkContext
from multiprocessing.sharedctypes import RawArray
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.utils.data import DataLoader, get_worker_info

from windlass.core.errors import ConfigError, Problem, WorkerError
from windlass.core.job_signals import WorkerStart
from windlass.core.logs import get_logger
from windlass.data.worker_fork import WorkerProcess, how_it_ended, sign_on
from windlass.data.worker_queue import WorkerEvent, WorkerQueue, advice, start_handover
from windlass.dist.beacon import beacon

logger = get_logger(__name__)

START_TIMEOUT = 30.0
# Sets it for loops of a script's own; a Trainer has `dataloader_start_timeout`.
START_TIMEOUT_VARIABLE = "WINDLASS_WORKER_START_TIMEOUT"
_NO_TASK = -1
# Tensors of a batch are fetched from the worker that made it. These are raised if it dies meanwhile.
_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)
# Seconds in which a worker that has closed its connections ends, so that its exit code is known.
_LAST_BREATH = 2.0


def _no_task_of(worker: int) -> str:
    return ""


@dataclass(frozen=True)
class Reader:
    """Who reads, for messages and for the start of workers."""

    purpose: str  # what the batches are for: "training", "evaluation", ..
    start_timeout: float = START_TIMEOUT  # seconds after which a worker that has not started is replaced
    task: Callable[[int], str] = _no_task_of  # what the worker of that number reads now; empty if unknown


def start_timeout(environ: Mapping[str, str]) -> float:
    """Seconds after which a worker that has not started is replaced, as the environment sets it. Raises ConfigError if
    it is not a number above 0.
    """
    text = environ.get(START_TIMEOUT_VARIABLE, str(START_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(Problem(START_TIMEOUT_VARIABLE, text, "must be a number of seconds above 0"))
    return seconds


def read_batches(loader: Iterable[Any], reader: Reader) -> Iterator[Any]:
    """Iterate any loader; the worker processes of a `DataLoader` are started and watched here.

    Raises:
        WorkerError: while iterating: a worker died, or could not be started. The loader can be iterated again.
    """
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        return _Reading(loader, reader)
    return iter(loader)


class TaskBoard:
    """What each worker of a pool reads, in memory that they share with their parent."""

    def __init__(self, workers: int) -> None:
        self._tasks = RawArray("q", max(workers, 1))
        self.clear()

    def clear(self) -> None:
        self._tasks[:] = [_NO_TASK] * len(self._tasks)

    def take(self, task: int) -> None:
        """In a worker: it begins to read `task`."""
        info = get_worker_info()
        if info is not None:
            self._tasks[info.id] = task

    def task_of(self, worker: int) -> int:
        return int(self._tasks[worker])


class _Crew:
    """The workers of a loader, from their start to their end."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._left = WorkerEvent()
        self._owner = os.getpid()
        self._follows = False  # `follow` was called: persistent workers have one iterator for all passes

    def follow(self, batches: object) -> None:
        """Kill the workers if the garbage collector takes the iterator of theirs.

        In a cycle of references it closes their queues before torch's iterator tells them to end, which then waits five
        seconds for each of them. Without a cycle they have ended before this is called.
        """
        if not self._follows:
            with contextlib.suppress(TypeError):  # a script's own iterator without weak references
                weakref.finalize(batches, self._collected).atexit = False
                self._follows = True

    def _collected(self) -> None:
        if os.getpid() == self._owner:  # not in a process that was forked from it
            self.end()

    def event(self) -> WorkerEvent:
        """Is set when the loader is left."""
        self._left = WorkerEvent()
        return self._left

    def process_class(self, context: BaseContext, start_timeout: float) -> Callable[..., Any]:
        """What a `DataLoader` takes for the `Process` class of `context`."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if isinstance(context, ForkContext):
                worker: Any = WorkerProcess(*args, **kwargs)
                worker.number, worker.patience = len(self._workers), start_timeout
                worker.left = self._left
            else:
                worker = context.Process(*args, **kwargs)  # type: ignore[attr-defined]
            self._workers.append(worker)
            return worker

        return make

    def is_broken(self) -> bool:
        """Return True if a worker died, and no error has been raised for it yet. False once the loader was left: torch
        kills workers that take long to end.

        Those that died are reaped here, so that torch's own handler finds and raises nothing.
        """
        codes = [worker.exitcode for worker in self._workers]  # of all: reading it reaps the process
        return any(codes) and not self._left.is_set()

    def is_named_in(self, error: Exception) -> bool:
        """Return True if `error` is torch's report of the end of one of these workers."""
        return any(f"(pid {worker.pid})" in str(error) for worker in self._workers)

    def death(self, reader: Reader, sign: Exception) -> WorkerError | None:
        """The error of a worker that died; None if `sign`, which was raised while reading, has another cause."""
        if isinstance(sign, _CUT_OFF):  # a little before the process has ended
            running = {worker.sentinel: worker for worker in self._workers if worker.is_alive()}
            for ended in multiprocessing.connection.wait(running, _LAST_BREATH):
                running[ended].join(_LAST_BREATH)
        unexpected = "exited unexpectedly" in str(sign)  # torch's words, for any exit code
        for number, worker in enumerate(self._workers):
            if worker.exitcode or (unexpected and worker.exitcode == 0):
                task = reader.task(number) or "data"
                return WorkerError(
                    f"data worker {number} (pid {worker.pid}) {how_it_ended(worker.exitcode)} while it read {task} "
                    f"for {reader.purpose}.{_advice(worker.exitcode)}"
                )
        return None

    def end(self) -> None:
        """Kill the remaining workers: the queues that they share may be corrupt once one of them was killed."""
        self._left.set()
        left = [worker for worker in self._workers if worker.pid is not None]
        for worker in left:
            worker.kill()
        for worker in left:
            worker.join()
        self._workers = []  # not before: `is_broken` reaps those that die, and torch's handler raises for others


# Errors of torch: of its own collation in a worker, and of a reader that has hardly a file left to open.
_OF_TORCH = ("unable to allocate shared memory", "Too many open files. Communication with the workers")


def _advice_on(error: Exception) -> str:
    """What to do about an error that a worker sent, or that torch raises here in place of one."""
    return advice(str(error)) if any(words in str(error) for words in _OF_TORCH) else ""


def _advice(code: int) -> str:
    if code == -getattr(signal, "SIGBUS", 0):  # memory that the system promised and does not have
        return advice("shared memory")
    if code != -signal.SIGKILL:
        return ""
    return (
        " The system kills a process in this way if memory runs out: set fewer workers or a smaller prefetch factor, "
        "and resume from the last checkpoint."
    )


_crews: WeakValueDictionary[int, _Crew] = WeakValueDictionary()
_lasting: WeakKeyDictionary[DataLoader[Any], _Crew] = WeakKeyDictionary()


class _Waits(threading.local):
    """The crew for a batch of which the present thread waits."""

    crew: _Crew | None = None


_waits = _Waits()


class _Reading:
    """One pass over a loader with workers."""

    def __init__(self, loader: DataLoader[Any], reader: Reader) -> None:
        self._loader, self._reader = loader, reader
        self._crew = _crew_of(loader)
        self._started = False
        self._batches: Iterator[Any] = self._watched(self._begin)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._started:
            return self._watched(self._next)
        self._started = True
        return self._watched(self._first)

    def _begin(self) -> Iterator[Any]:
        with _started_by_us(self._loader, self._crew, self._reader):
            batches = iter(self._loader)
        self._crew.follow(batches)
        return batches

    def _first(self) -> Any:
        """A subclass may start its workers as late as this."""
        with _started_by_us(self._loader, self._crew, self._reader):
            return next(self._batches)

    def _next(self) -> Any:
        return next(self._batches)

    def _watched(self, work: Callable[[], Any]) -> Any:
        """Call `work`, in which the death of a worker is an error of ours."""
        try:
            return self._waited_for(work)
        except WorkerError as error:
            raise self._failed(error) from None
        except (_DiedError, RuntimeError, *_CUT_OFF) as error:
            death = self._crew.death(self._reader, error)
            if death is not None:
                raise self._failed(death) from None  # torch's message does not name the cause
            if hint := _advice_on(error):
                raise self._failed(WorkerError(f"{error}{hint}")) from None
            raise
        except BaseException as stop:
            if not isinstance(stop, Exception):  # a signal ended the wait: a worker may never answer
                self._discard()
            raise

    def _waited_for(self, work: Callable[[], Any]) -> Any:
        """Call `work`; `_DiedError` may be raised anywhere in it, and never after it."""
        outer = _waits.crew
        try:
            _waits.crew = self._crew
            if self._crew.is_broken():
                raise _DiedError
            return work()
        except StopIteration as end:
            if end.value is None:
                raise
            # Of code in a worker, with its traceback as text: the pass would end here without the other batches.
            raise RuntimeError(end.value) from None
        finally:
            _waits.crew = outer

    def _failed(self, error: WorkerError) -> WorkerError:
        """What to raise. The next pass over the loader starts new workers."""
        logger.error(str(error))  # at once: this rank may have to answer the others until they are done
        self._discard()
        return error

    def _discard(self) -> None:
        self._crew.end()
        _lasting.pop(self._loader, None)
        # Torch keeps persistent workers here, dead or alive.
        self._loader._iterator = None


def _crew_of(loader: DataLoader[Any]) -> _Crew:
    crew = _lasting.get(loader)
    if crew is None or getattr(loader, "_iterator", None) is None:
        crew = _Crew()
        if loader.persistent_workers:
            _lasting[loader] = crew
    _crews[id(crew)] = crew
    return crew


def _all_crews() -> list[_Crew]:
    # Not `_crews.values()`, which raises where another thread starts to read meanwhile.
    return [crew for reference in _crews.valuerefs() if (crew := reference()) is not None]


def _arrive(own: Callable[[int], Any] | None, worker: int) -> None:
    """Called in a worker when all handlers of signals are set."""
    sign_on()
    start_handover()
    if own is not None:
        own(worker)


@contextlib.contextmanager
def _started_by_us(loader: DataLoader[Any], crew: _Crew, reader: Reader) -> Iterator[None]:
    """Workers that `loader` starts in the body belong to `crew`."""
    own_context, own_init = loader.multiprocessing_context, loader.worker_init_fn
    context: Any = own_context
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    # A copy, because the contexts of `multiprocessing` are global; and of its class, which PyTorch checks.
    ours = copy.copy(context)
    ours.Process = crew.process_class(context, reader.start_timeout)
    ours.Queue = functools.partial(WorkerQueue, ctx=context)
    ours.Event = crew.event
    loader.multiprocessing_context = ours
    loader.worker_init_fn = WorkerStart.now(functools.partial(_arrive, own_init))
    try:
        yield
    finally:
        _listen()  # first: whatever interrupts this ends the workers, of which torch's own handler would raise an error
        loader.multiprocessing_context, loader.worker_init_fn = own_context, own_init
        beacon().call("read data")


class _DiedError(Exception):
    """Raised while the main thread waits for a batch that will not come."""


class _Listener:
    """Handles SIGCHLD. Torch's handler raises at any point of the program, such as in the middle of a save; this one
    only while the main thread waits for a batch. Otherwise the error is raised when the next batch is requested.
    """

    def __init__(self, before: Any) -> None:
        self._before, self._owner = before, os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False where it was inherited by a fork."""
        return os.getpid() == self._owner

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_of_this_process:
            self._pass_on(number, frame)
            return
        while True:
            for crew in _all_crews():
                crew.is_broken()
            try:
                self._pass_on(number, frame)
                break
            except RuntimeError as error:
                # Torch's, of a worker that died after we looked: look again, and it is no longer found.
                if not any(crew.is_named_in(error) for crew in _all_crews()):
                    raise
        waited_for = _waits.crew  # of the main thread, where handlers run
        if waited_for is not None and waited_for.is_broken():
            raise _DiedError

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)


def _listen() -> None:
    """Put our handler before torch's, which torch sets when it starts its first worker."""
    if threading.current_thread() is not threading.main_thread():
        return  # deaths are noticed some seconds later, by torch's own looking
    before = signal.getsignal(signal.SIGCHLD)
    if not (isinstance(before, _Listener) and before.is_of_this_process):
        signal.signal(signal.SIGCHLD, _Listener(before))
