"""Processes whose launcher, or whose rank, is killed before it can end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, end_all

# Each rank, and a data worker of each, in the middle of a sample: deaf to whatever a process may ignore.
DEAF = """
import os, signal, sys, time
import torch
from windlass.accelerator.accelerator import Accelerator

def say(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        ignore_signals()
        say("worker")
        time.sleep(1000)

def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

ignore_signals()
say("rank")
loader = torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=1)
next(iter(Accelerator(cpu=True).prepare(loader)))
"""


def started(tmp_path: Path, script: str, processes: int, *flags: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    path.chmod(0o755)
    command = ["-m", "windlass", "launch", "--cpu", "--num_processes", str(processes), *flags, str(path)]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "WINDLASS_HOME": "/nowhere", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def pids_of(job: subprocess.Popen[str], number: int) -> dict[int, str]:
    """The first `number` processes that say who they are."""
    assert job.stdout is not None
    found: dict[int, str] = {}
    for line in job.stdout:
        name, _, pid = line.partition(" ")
        if name in ("rank", "worker"):
            found[int(pid)] = name
        if len(found) == number:
            break
    return found


@pytest.mark.dist
def test_a_launcher_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    job = started(tmp_path, DEAF, 1)
    try:
        pids = pids_of(job, 2)
        assert sorted(pids.values()) == ["rank", "worker"]
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=60)  # the pipe ends when the last process that holds it has gone
    finally:
        end_all(job)
        for pid in pids:
            subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_no_data_worker(tmp_path: Path) -> None:
    job = started(tmp_path, DEAF, 1)
    try:
        pids = pids_of(job, 2)
        rank = next(pid for pid, name in pids.items() if name == "rank")
        os.kill(rank, signal.SIGKILL)
        said, _ = job.communicate(timeout=60)
    finally:
        end_all(job)
        for pid in pids:
            subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
    assert job.returncode == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL" in said


@pytest.mark.dist
def test_a_program_of_any_kind_ends_with_its_launcher(tmp_path: Path) -> None:
    job = started(tmp_path, "#!/bin/sh\ntrap '' TERM\necho rank $$\nexec sleep 1000\n", 1, "--no_python")
    try:
        pids = pids_of(job, 1)
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=60)
    finally:
        end_all(job)
        for pid in pids:
            subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
