"""What the tests start for themselves ends with them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import Started, launch, run_script, run_to_its_end
from tests.dist.rank_server import answer

# As torch's launcher does: its processes lead sessions of their own.
LAUNCHER = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the end of a process")
def test_a_job_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    for patience in (2, 8, 32):  # until it had the time to start its process
        with pytest.raises(subprocess.TimeoutExpired):
            run_to_its_end([sys.executable, "-c", LAUNCHER, str(note)], timeout=patience)
        if note.exists():
            break
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process = os.pidfd_open(int(note.read_text()))
        assert select.select([process], (), (), 60)[0], "killed, it has ended soon"
        os.close(process)


RANKS = """
import os, sys, time
# In one piece: the lines of two processes that write into one pipe do not mix then.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n")
sys.stdout.flush()
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(1000)
"""


def test_an_exit_code_belongs_to_the_process_that_was_asked_for() -> None:
    """Not to an earlier one with the same process id."""
    child = os.fork()
    if not child:
        os._exit(3)
    assert answer({"wait": child}) == {"code": 3}
    with pytest.raises(ChildProcessError):
        answer({"wait": child})


def test_the_end_of_a_script_is_told_twice(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("print('here', flush=True); raise SystemExit(3)")
    with Started(script) as process:
        assert process.end() == (3, "here\n")
        assert process.end() == (3, "")


@pytest.mark.dist
def test_ranks_are_ended_when_one_fails(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    said = launch(2, script, "x", expect=1)
    assert sorted(said.splitlines()) == ["rank 0 of 2 ['x']", "rank 1 of 2 ['x']"]
    with pytest.raises(AssertionError, match=r"exit codes \[-15, 3\]"):
        launch(2, script)


@pytest.mark.dist
def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text("import time; time.sleep(1000)")
    with pytest.raises(AssertionError, match="not done after 1 s"):
        launch(2, script, timeout=1)


@pytest.mark.slow  # the server that the other tests have is ended, and starts again
def test_a_wait_that_was_interrupted_does_not_answer_the_next_request(tmp_path: Path) -> None:
    sleeping, speaking = tmp_path / "sleeping.py", tmp_path / "speaking.py"
    sleeping.write_text("import time\ntime.sleep(600)\n", "utf-8")
    speaking.write_text("print('heard'); raise SystemExit(3)\n", "utf-8")

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    run_script(speaking, expect=3)  # the server has started
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(InterruptedError):
            run_script(sleeping)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "heard" in run_script(speaking, expect=3)
