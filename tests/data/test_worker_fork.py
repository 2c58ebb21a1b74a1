"""Signals that come while a data worker is forked."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import sys
import threading
from typing import Any

import pytest
from tests.data.cases import end_in_a_minute
from tests.trainer.resume_cases import in_a_child
from torch.utils.data import DataLoader, Dataset

from windlass.data.worker_fork import dying_with_this
from windlass.data.workers import Reader, read_batches


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class OtherThread:
    """A thread that receives signals, as those of libraries do while this one blocks them."""

    def __init__(self) -> None:
        self._asked, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._asked.wait()
        interrupt()
        self._done.set()

    def interrupt(self) -> None:
        self._asked.set()
        self._done.wait()


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_while_a_worker_is_forked_leaves_no_process(threads: int) -> None:
    def work() -> None:
        end_in_a_minute()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(after_in_parent=interrupt if threads == 1 else OtherThread().interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(read_batches(DataLoader([0], num_workers=1), Reader("training")))
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    assert in_a_child(work) == 0


class Handled(Dataset[int]):
    """A worker that sends itself a signal."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        signal.raise_signal(signal.SIGUSR2)
        return len(handled)


handled: list[int] = []


@pytest.mark.skipif(sys.platform != "linux", reason="the system must be asked to end it")
def test_a_worker_that_hangs_in_its_fork_ends_with_its_parent() -> None:
    left, lives = os.pipe()

    def work() -> None:
        def die_waiting(frame: Any, event: str, _: Any) -> None:
            if frame.f_code.co_name == "_signs_on":
                os.kill(os.getpid(), signal.SIGKILL)

        lock = threading.Lock()
        lock.acquire()
        os.register_at_fork(after_in_child=lock.acquire)
        sys.settrace(die_waiting)
        list(read_batches(DataLoader([0], num_workers=1), Reader("training")))

    assert in_a_child(work) == -signal.SIGKILL
    os.close(lives)  # which the worker has, too
    assert multiprocessing.connection.wait([left], 60)
    assert os.read(left, 1) == b""
    os.close(left)


def forked(wait_for: int) -> int:
    """A child that ends well once there is something to read."""
    child = os.fork()
    if child == 0:
        os.read(wait_for, 1)
        os._exit(0)
    return child


def test_a_worker_that_started_does_not_end_with_a_process_that_was_forked_meanwhile() -> None:
    reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
    worker = forked(reads[0])
    with dying_with_this(worker):
        other = forked(reads[1])
    for child, write in ((other, writes[1]), (worker, writes[0])):
        os.write(write, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for descriptor in (*reads, *writes):
        os.close(descriptor)


def test_a_worker_handles_signals_as_the_script_does() -> None:
    def work() -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(number))
        batches = read_batches(DataLoader(Handled(), num_workers=1, collate_fn=list), Reader("training"))
        assert list(batches) == [[1]]
        signal.raise_signal(signal.SIGUSR2)
        assert len(handled) == 1

    assert in_a_child(work) == 0
