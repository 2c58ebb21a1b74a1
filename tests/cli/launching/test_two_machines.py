"""`windlass launch` on each of two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.launching.machines import MachineHere, free_port, two_machines
from tests.cli.launching.resuming_ranks import UPDATES, train
from tests.dist.launch import ROOT, end_all

SCRIPT = Path(__file__).parent / "resuming_ranks.py"


def start(machine: MachineHere, rank: int, main: str, port: int, *words: object) -> subprocess.Popen[str]:
    command = [
        *machine.prefix, sys.executable, "-m", "windlass", "launch", "--cpu", "--num_machines", "2",
        "--num_processes", "2", "--machine_rank", rank, "--main_process_ip", main, "--main_process_port", port,
    ]  # fmt: skip
    return subprocess.Popen(
        [str(word) for word in (*command, *words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WINDLASS_HOME": "/nowhere"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.dist
def test_a_job_whose_worker_was_killed_starts_again_and_ends_with_the_right_weights(tmp_path: Path) -> None:
    port = free_port()
    with two_machines() as machines:
        # Machine 1 first: it has to wait for the main machine.
        jobs = [
            start(
                machines[rank], rank, machines[0].address, port, "--max_restarts", 1, SCRIPT, tmp_path / "two"
            )
            for rank in (1, 0)
        ]
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                end_all(job)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    assert "rank 1 of machine 1" in said[0]
    assert "rank 0 of machine 0" in said[1]
    for text in said:
        assert "the job failed: rank 1 was killed by SIGKILL" in text
        assert "[step 5," in text
        assert "restart 1 of 1" in text
    train(tmp_path / "one", world=1)
    found, expected = (
        load_file(tmp_path / name / f"checkpoint-{UPDATES}" / "model.safetensors") for name in ("two", "one")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
