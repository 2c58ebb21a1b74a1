"""A machine that is lost while the job runs: it stops without a word, or its launcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port, launch_one, two_machines
from tests.dist.launch import end_all, started_by
from torch.distributed import HashStore

from windlass.cli.launching.peers import OtherMachines

SCRIPT = Path(__file__).with_name("lost_ranks.py")


def tree_of(job: subprocess.Popen[str]) -> list[int]:
    return [job.pid, *started_by(job.pid)]


def test_a_machine_that_is_lost_before_it_has_sent_anything_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    peers = OtherMachines(store, 1, ["first", "second"], 0.0, int)
    peers.stop()
    assert [str(machine) for machine in peers.lost()] == ["machine 0 (first)"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lost", "how"),
    [
        (0, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_the_other_machine_ends_the_job_and_names_the_lost_one(lost: int, how: signal.Signals) -> None:
    port = free_port()
    with two_machines() as machines:
        jobs = [
            launch_one(machines[rank], rank, machines[0].address, port, "--machine_timeout", 5, SCRIPT, lost)
            for rank in range(2)
        ]
        stopped: list[int] = []
        try:
            for job in jobs:
                assert job.stdout is not None
                assert any("met" in line for line in iter(job.stdout.readline, ""))
            stopped = tree_of(jobs[lost])
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            said, _ = jobs[1 - lost].communicate(timeout=60)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for job in jobs:
                end_all(job)
    assert jobs[1 - lost].returncode == 69, said
    assert f"the job lost a machine: machine {lost} (" in said
    assert f"rank {1 - lost} (machine {1 - lost}): " in said
