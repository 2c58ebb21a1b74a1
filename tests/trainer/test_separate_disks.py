"""Machines without a shared folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, launch
from tests.trainer.resume_cases import Case, run

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_disks(tmp_path: Path) -> None:
    launch(2, HERE / "nodes_ranks.py", tmp_path)
    # Put together, they are a checkpoint like any other: one process reads it too.
    changed = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "save_strategy": "no"}
    for name in ("joined", "joined_sharded"):
        trainer = run(tmp_path / name, Case(changed), resume=True)
        assert trainer.state.global_step == 9


def can_mount() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    try:
        command = ["unshare", "-rm", "mount", "--bind", "/tmp", "/tmp"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(not can_mount(), reason="needs mounts of a process's own")
def test_one_path_on_two_machines(tmp_path: Path) -> None:
    """As on a cluster without a shared folder: the same output_dir is another folder on each machine."""
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [machine(tmp_path, rank, port) for rank in (0, 1)]
    said = [job.communicate(timeout=200)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)[-6000:]
    assert list(run_folder.iterdir()) == [], "all was written under the mounts"
    for rank in (0, 1):
        assert (tmp_path / f"disk-{rank}" / "checkpoint-4" / f"rank-0000{rank}.json").is_file()
    models = [(tmp_path / f"disk-{rank}" / "model.safetensors").read_bytes() for rank in (0, 1)]
    assert models[0] == models[1], "save_on_each_node"


def machine(tmp_path: Path, rank: int, port: int) -> subprocess.Popen[str]:
    """One process that sees `disk-RANK` as the folder of the run."""
    disk = tmp_path / f"disk-{rank}"
    disk.mkdir()
    launcher = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    mount = 'mount --bind "$1" "$2" && exec "$3" "$4" "$2"'
    script = HERE / "nodes_mounted.py"
    return subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", mount, "sh", disk, tmp_path / "run", sys.executable, script],
        env={**os.environ, **{name: str(value) for name, value in {**launcher, **meeting}.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
