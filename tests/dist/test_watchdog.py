"""What a process reports while it waits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.dist.launch import ROOT, end_all, end_of

from windlass.core.errors import ConfigError
from windlass.dist.beacon import Beacon
from windlass.dist.watchdog import EXIT_STALLED, REPORT_VARIABLE, OtherRanks, Watchdog, _report_seconds

SCRIPT = Path(__file__).with_name("watched.py")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCH = ("windlass", "launch", "--cpu", "--num_processes", "2")


def said_until(ending: str, *command: str) -> str:
    """What a job says until a line with `ending`; it is ended then."""
    own = {REPORT_VARIABLE: "4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WINDLASS_HOME": "/x"}
    job = subprocess.Popen(
        [sys.executable, "-m", *command], env={**os.environ, **own},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    said = ""
    try:
        for line in job.stdout:
            said += line
            if ending in line:
                return said
    finally:
        end_all(job)
    raise AssertionError(said)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("launcher", "how"),
    [pytest.param(LAUNCH, "native", marks=pytest.mark.slow), (TORCHRUN, "sleeps")],
)
def test_a_rank_that_waits_names_the_rank_that_it_waits_for(launcher: tuple[str, ...], how: str) -> None:
    said = said_until("it waits for rank 1 [", *launcher, str(SCRIPT), how, "600")
    assert "rank 0 of 2 has made no progress for 4 s [step 3, in 'forward and backward']" in said
    assert "it waits for rank 1 [step 3, in 'forward and backward']" in said


@pytest.mark.dist
@pytest.mark.parametrize(
    "how", ["native", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sleeps", "stopped"))]
)
def test_the_launcher_names_the_rank_that_is_late_though_all_marks_are_equal(how: str) -> None:
    command = (*LAUNCH, "--stall_timeout", 8, SCRIPT, how, 600)
    code, said = end_of(*command, timeout=150, environ={"WINDLASS_HOME": "/x"})
    assert code == EXIT_STALLED, said
    assert "the job stalled: rank 1 made no progress" in said


@pytest.mark.dist
def test_a_single_process_ends_when_it_waits_for_longer_than_it_may() -> None:
    code, said = end_of(SCRIPT, "data", 4, timeout=150, environ={REPORT_VARIABLE: "2"})
    assert code == EXIT_STALLED, said
    assert said.count("this process has made no progress for 2 s [step 3, in 'read data']") == 1
    assert 'time.sleep(1000 if how == "data" else 0)' in said
    assert "it has waited longer than ddp_timeout=4 s allows" in said


@pytest.mark.parametrize("thread", ["windlass-watchdog", "windlass-watch-board"])
def test_a_process_ends_while_a_thread_is_in_a_call_of_the_store(thread: str) -> None:
    """The call returns when the modules are gone, unless the process waits for it."""
    command = [sys.executable, "-m", "tests.dist.ending_process", thread]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, env=environ, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.stdout is not None
        server = next(int(line) for line in job.stdout if line.strip().isdigit())  # torch may print others
        select.select([job.stdout], [], [], 1.5)  # readable if the process does not wait
        os.kill(server, signal.SIGCONT)
        _, errors = job.communicate(timeout=100)
    finally:
        end_all(job)
    assert job.returncode == 0, errors.decode()


def test_marks_are_published_in_each_process_group_that_a_script_opens() -> None:
    others = OtherRanks({"RANK": "0", "WORLD_SIZE": "2"}, report_after=0.06)
    try:
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                others.publish(Beacon().mark())
                dist.distributed_c10d._get_default_store().wait(["windlass/mark/0"], timedelta(seconds=60))
            finally:
                dist.destroy_process_group()
    finally:
        others.end()


def test_the_seconds_until_a_report_are_a_number_above_zero() -> None:
    assert _report_seconds({REPORT_VARIABLE: ""}) == _report_seconds({}) > 0
    # Of 0 the watching thread would never sleep.
    for wrong in ("soon", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match=f"{REPORT_VARIABLE}='{wrong}': must be a number of seconds"):
            _report_seconds({REPORT_VARIABLE: wrong})


def test_what_is_no_wait_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    beacon = Beacon()
    dog = Watchdog(beacon, OtherRanks({}, 60), report_after=60, limit=1800)
    for call in ("start", "after update", "evaluate", "end"):
        beacon.call(call)
        for _ in range(3):
            dog.look(1e6)
    assert not caplog.records
    beacon.call("save")
    for _ in range(5):
        dog.look(61)
    assert len(caplog.records) == 1, "once for each wait"
