"""Signals that come while a data worker is forked."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from tests.data.cases import end_in_a_minute
from tests.trainer.resume_cases import in_a_child
from torch.utils.data import DataLoader, Dataset

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


def test_a_worker_handles_signals_as_the_script_does() -> None:
    def work() -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(number))
        batches = read_batches(DataLoader(Handled(), num_workers=1, collate_fn=list), Reader("training"))
        assert list(batches) == [[1]]
        signal.raise_signal(signal.SIGUSR2)
        assert len(handled) == 1

    assert in_a_child(work) == 0
