"""Workers leave the signals of a job to their run, and end with it all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_that_fails_ends_with_its_workers(tmp_path, method, told):
    script = tmp_path / "fails.py"
    script.write_text(FAILS_WITH_A_WORKER)
    # What is printed is read until the last process that holds the pipe, the worker, has ended.
    ended = subprocess.run(
        [sys.executable, script, method, told], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "the run failed" in ended.stderr
