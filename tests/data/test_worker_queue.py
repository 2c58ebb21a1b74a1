"""Batches that a data worker cannot send, or not to their end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.connection
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.cases import end_in_a_minute, of_worker
from tests.dist.launch import ROOT, end_of
from tests.trainer.resume_cases import in_a_child
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from windlass.core.errors import WorkerError
from windlass.data.worker_queue import WorkerQueue, advice
from windlass.data.workers import Reader, read_batches

FULL = "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"


class Unsendable:
    """Fails where it is sent, as a tensor does for which there is no shared memory."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        raise RuntimeError(self.text)


def lost(samples: list[int]) -> Any:
    return Unsendable(FULL) if 5 in samples else torch.tensor(samples)


def refused(samples: list[int]) -> Any:
    """Torch's own collation puts a batch together in shared memory."""
    raise RuntimeError(FULL)


def unpicklable(samples: list[int]) -> Any:
    return lambda: samples


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def loader(collate: Any, data: Any = range(12), **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate, **options)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"data": Numbers()}])
def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place(options: dict[str, Any]) -> None:
    own = loader(lost, **options)
    batches = read_batches(own, Reader("training"))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(WorkerError) as caught:
        next(batches)
    for words in ("data worker 0 (pid ", FULL, "/dev/shm has", "--shm-size", "dataloader_num_workers"):
        assert words in str(caught.value)
    own.collate_fn = torch.tensor
    assert len(list(read_batches(own, Reader("training")))) == 6


def test_new_interpreters_have_the_same_queue() -> None:
    with pytest.raises(WorkerError, match="--shm-size"):
        list(read_batches(loader(lost, multiprocessing_context="spawn"), Reader("training")))


def test_what_torch_cannot_collate() -> None:
    with pytest.raises(WorkerError, match=r"unable to allocate shared memory(?s:.*)--shm-size"):
        list(read_batches(loader(refused), Reader("training")))


def test_what_cannot_be_pickled_is_an_error_too() -> None:
    with pytest.raises(WorkerError, match=r"could not send what it read: .*(pickle|local object)") as caught:
        list(read_batches(loader(unpicklable), Reader("training")))
    assert "shm" not in str(caught.value)


class Ending(Dataset[torch.Tensor]):
    """Raises in the middle of a pass what ends a loop."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1) if index < 5 else next(iter(()))


def test_a_stop_iteration_of_a_worker_is_an_error_and_not_the_end_of_the_pass() -> None:
    with pytest.raises(RuntimeError, match=r"Caught StopIteration in .* worker process"):
        list(read_batches(DataLoader(Ending(), num_workers=2), Reader("training")))


def test_advice_is_given_on_what_is_short_alone() -> None:
    assert advice("the disk is on fire") == ""
    assert "--shm-size" in advice(FULL)


def tensors(samples: list[int]) -> list[torch.Tensor]:
    """Two tensors, and later forty: each takes an open file of the worker, and one of the loader's process."""
    return [torch.tensor(samples) for _ in range(2 if samples[0] < 4 else 40)]


@pytest.mark.parametrize(("limits", "spare"), [("both", 16), ("the reader", 16), ("the reader", 7)])
def test_too_few_open_files(limits: str, spare: int) -> None:
    """With a very small limit torch raises an error in place of what was received."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/dev/fd")) + spare, before[1]
    batches = read_batches(loader(tensors), Reader("training"))
    try:
        if limits == "both":
            resource.setrlimit(resource.RLIMIT_NOFILE, few)
        next(batches)
        resource.setrlimit(resource.RLIMIT_NOFILE, few)
        with pytest.raises(WorkerError, match=rf"may have {few[0]} files open(?s:.*)ulimit -n"):
            list(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class LateFirst(Dataset[torch.Tensor]):
    """Sample 0 is read when the worker of the others has met its limit."""

    def __init__(self) -> None:
        self.met = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            self.met.wait()
        return torch.tensor(index)


def test_a_worker_for_which_the_system_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library takes the thread that failed for started: the loader would wait for the worker's next."""
    samples, start = LateFirst(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        info = get_worker_info()
        if info is not None and info.id == 1 and thread._target.__name__ == "_serve":  # type: ignore[attr-defined]
            samples.met.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    two = DataLoader(samples, batch_size=None, num_workers=2)
    with pytest.raises(WorkerError, match=r"can't start new thread(?s:.*)--pids-limit"):
        list(read_batches(two, Reader("training")))


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small /dev/shm")
def test_a_really_small_shared_memory() -> None:
    code, said = end_of(Path(ROOT / "tests/data/small_shared_memory.py"))
    if code == 77:
        pytest.skip("may not mount a file system of its own at /dev/shm")
    assert code == 0, said
    for kind in ("train", "evaluate", "loop", "collated", "without room"):
        assert f"{kind}: WorkerError with its fix" in said, said


def kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CutOff(Dataset[int]):
    """The process of a worker ends while it writes a batch that is larger than what a pipe holds."""

    def __init__(self, end: Callable[[], Any] = kill_this) -> None:
        self._end = end

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            queue = of_worker("data_queue")
            with queue._wlock:
                os.write(queue._writer.fileno(), struct.pack("!i", 1 << 20) + b"the begin of it")
                while multiprocessing.connection.wait([queue._reader], 0):
                    os.sched_yield()  # until it has been read
                self._end()
        return index


def ends_named(words: str, end: Callable[[], Any] = kill_this, **options: Any) -> None:
    loader: DataLoader[Any] = DataLoader(CutOff(end), 2, num_workers=2, collate_fn=list, timeout=1, **options)
    batches = read_batches(loader, Reader("training"))
    with pytest.raises(WorkerError, match=words + " while it read data for training"):
        list(batches)
    del batches  # torch waits here for the thread that pins, which has read the begin of that message
    gc.collect()


def in_a_thread() -> None:
    thread = threading.Thread(target=ends_named, args=("was killed by SIGKILL",))
    caught: list[Any] = []
    threading.excepthook = caught.append
    thread.start()
    thread.join()
    assert not caught, caught


def without_a_signal() -> None:
    ends_named("exited with code 0", lambda: os._exit(0))


def with_a_thread_that_pins() -> None:
    """Of a device that is not there: lists of numbers need none."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda device: None
    torch.utils.data._utils.pin_memory.MP_STATUS_CHECK_INTERVAL = 0.5  # type: ignore[attr-defined]
    ends_named("was killed by SIGKILL", pin_memory=True)


@pytest.mark.parametrize("reading", [in_a_thread, without_a_signal, with_a_thread_that_pins])
def test_a_message_without_an_end_stops_no_reader(reading: Callable[[], None]) -> None:
    def work() -> None:
        end_in_a_minute()
        reading()

    assert in_a_child(work) == 0


def test_ctrl_c_while_a_message_is_put_in_leaves_no_lock() -> None:
    """Python has acquired the lock, and not yet begun what lets it go."""

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not threading.Condition.__enter__.__code__:
            return None
        if event == "return":
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return interrupt

    def work() -> None:
        end_in_a_minute()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        queue = WorkerQueue(ctx=multiprocessing.get_context("fork"))
        queue.put(0)
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.put(1)
        queue.put(2)
        assert queue.get(timeout=60) == 0
        queue.cancel_join_thread()

    assert in_a_child(work) == 0


class SlowRelease:
    """A lock whose owner is slow to let it go."""

    def __init__(self, lock: Any) -> None:
        self.acquire, self._lock = lock.acquire, lock

    def release(self) -> None:
        time.sleep(0.5)
        self._lock.release()


class Unequal(IterableDataset[int]):
    """Worker 1 has nothing; worker 0 has a sample once the process of worker 1 has ended."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 1:
            queue = of_worker("data_queue")
            queue._wlock = SlowRelease(queue._wlock)
            os.write(self._write, struct.pack("!i", os.getpid()))
            return
        (other,) = struct.unpack("!i", os.read(self._read, 4))
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(other, 0)
                time.sleep(0.01)
        yield 7


def test_a_worker_that_ends_before_the_others_leaves_them_the_lock() -> None:
    def work() -> None:
        end_in_a_minute()
        loader: DataLoader[Any] = DataLoader(Unequal(), 1, num_workers=2, collate_fn=list)
        assert list(read_batches(loader, Reader("training"))) == [[7]]

    assert in_a_child(work) == 0


class Orphaned(CutOff):
    """The other worker kills their parent once the lock of the queue is held by a dead one, and then sends a batch."""

    def __init__(self) -> None:
        self._held, write = os.pipe()
        super().__init__(lambda: (os.write(write, b"held"), kill_this()))

    def __getitem__(self, index: int) -> int:
        if index == 6:
            os.read(self._held, 4)
            os.kill(os.getppid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_waits_for_the_lock_of_a_dead_one_ends_with_its_parent() -> None:
    """Where a thread has started it: there the system does not end it."""
    left, lives = os.pipe()

    def work() -> None:
        end_in_a_minute()
        torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # type: ignore[attr-defined]
        loader: DataLoader[Any] = DataLoader(Orphaned(), 2, num_workers=2, collate_fn=list)
        reading = threading.Thread(target=lambda: list(read_batches(loader, Reader("training"))))
        reading.start()
        reading.join()

    assert in_a_child(work) == -signal.SIGKILL
    os.close(lives)
    assert multiprocessing.connection.wait([left], 60)
    assert os.read(left, 1) == b""
