"""A machine that is lost while the job runs: it stops without a word, or its launcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.launching.machines import free_port, two_machines
from tests.dist.launch import ROOT, end_all, started_by

SCRIPT = Path(__file__).with_name("lost_ranks.py")


def tree_of(job: subprocess.Popen[str]) -> list[int]:
    return [job.pid, *started_by(job.pid)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lost", "how"), [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (0, signal.SIGKILL), (1, signal.SIGKILL)]
)
def test_the_other_machine_ends_the_job_and_names_the_lost_one(lost: int, how: signal.Signals) -> None:
    port = free_port()
    with two_machines() as machines:
        jobs = []
        for rank in range(2):
            words = (
                *machines[rank].prefix, sys.executable, "-m", "windlass", "launch", "--cpu", "--num_machines", "2",
                "--num_processes", "2", "--machine_rank", str(rank), "--main_process_ip", machines[0].address,
                "--main_process_port", str(port), "--machine_timeout", "5", str(SCRIPT),
            )  # fmt: skip
            environ = {
                "WINDLASS_HOME": "/nowhere",
                "PYTHONPATH": str(ROOT),
                "LATE": str(lost),
                "WINDLASS_RDZV_TOKEN": "of-two-test-machines",
            }
            jobs.append(
                subprocess.Popen(
                    words, env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
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
