"""Workers leave the signals of a job to their run, and end with it all the same."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from windlass.core.job_signals import WorkerStart, handling

FAILS_WITH_A_WORKER = """
import multiprocessing, os, signal, sys, time
from windlass.core.job_signals import WorkerStart, handling

def work(start, ready):
    start(0)
    ready.set()
    while True:
        time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with handling(signal.SIGTERM, lambda number: None):
        ready = context.Event()
        worker = context.Process(target=work, args=(WorkerStart.now(None), ready), daemon=True)
        worker.start()
        ready.wait()
        if sys.argv[2] == "told":
            os.kill(worker.pid, signal.SIGTERM)
            worker.join(0.2)
            assert worker.is_alive()
        print(worker.pid, flush=True)
        raise ValueError("the run failed")
"""


@pytest.mark.parametrize("told", ["told", "not told"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_run_that_fails_ends_with_its_workers(tmp_path, method, told):
    script = tmp_path / "fails.py"
    script.write_text(FAILS_WITH_A_WORKER)
    # What is printed is read until the last process that holds the pipe, the worker, has ended.
    ended = subprocess.run(
        [sys.executable, script, method, told], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "the run failed" in ended.stderr


WORKER_WITHOUT_A_PARENT = """
import multiprocessing, os, signal, sys, threading, time
from windlass.core.job_signals import WorkerStart

def work(start, ready):
    ready.set()
    multiprocessing.parent_process().join()
    start(0)
    time.sleep(600)

def begin(context, ready):
    start = WorkerStart.now(None)
    context.Process(target=work, args=(start, ready), daemon=True).start()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ready = context.Event()
    if sys.argv[2] == "main":
        begin(context, ready)
    else:
        threading.Thread(target=begin, args=(context, ready)).start()
    ready.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_whose_parent_is_killed_while_it_starts_ends(tmp_path, method, thread):
    """It would live for ever, and with it the connections that it has inherited: other ranks would wait."""
    script = tmp_path / "killed.py"
    script.write_text(WORKER_WITHOUT_A_PARENT)
    # The pipe is read to its end, which comes with that of the last process that holds it, the worker.
    ended = subprocess.run(
        [sys.executable, script, method, thread], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL


def test_workers_ignore_a_signal_until_the_last_of_two_runs_has_ended():
    with handling(signal.SIGUSR1, print):
        with handling(signal.SIGUSR1, print):  # of a run within a callback of the other
            pass
        start = WorkerStart.now(None)
        assert start.left == (signal.SIGUSR1,)
        assert start.running.value
    assert not start.running.value
