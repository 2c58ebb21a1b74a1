"""Machines without a shared folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.dist.launch import ROOT, on_ranks
from tests.trainer.resume_cases import KILLED, Case, bits, in_a_child, kill, run

from windlass.checkpoint import nodes
from windlass.checkpoint.files import Files
from windlass.core.errors import CheckpointError, ConfigError

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_disks(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)
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


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SHARDED = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
nodes.WAITS = (0.01, 0.05)  # these file systems show at once what others wrote
CASE = Case(
    {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "save_steps": 2,
        "save_total_limit": 1,
        "logging_strategy": "no",
    }
)

# Another rank may just remove its own.
LOCK = shutil.ignore_patterns(".windlass-run.lock*")


class Place:
    """Where the run `name` writes: under the folder of this rank's disk."""

    def __init__(self, root: Path) -> None:
        self.root, self._meetings = root, 0

    def disk(self, rank: int = RANK) -> Path:
        return self.root / f"disk-{rank}"

    def checkpoints(self, name: str, rank: int = RANK) -> list[str]:
        return sorted(path.name for path in (self.disk(rank) / name).glob("*checkpoint-*"))

    def together(self, work: Callable[[], Any]) -> int:
        """Both ranks do it, in children that know each other."""
        self._meetings += 1
        meeting = f"file://{self.root}/meeting-{self._meetings}"

        def meet_and_work() -> None:
            limit = timedelta(seconds=60)
            dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=WORLD, timeout=limit)
            work()
            dist.destroy_process_group()

        return in_a_child(meet_and_work)

    def meet(self) -> None:
        """Neither goes on before the other is here."""
        assert self.together(dist.barrier) == 0

    def run(self, name: str, *callbacks: Any, disk: int = RANK, **how: Any) -> int:
        def train() -> None:
            folder = self.disk(disk) / name
            trainer = run(folder, CASE, *callbacks, **how)
            end = {"step": trainer.state.global_step}
            if not how.get("fsdp"):
                end["bits"] = bits(trainer)
            (self.disk() / f"{name}.json").write_text(json.dumps(end))

        return self.together(train)

    def end(self, name: str) -> dict[str, Any]:
        return json.loads((self.disk() / f"{name}.json").read_text())  # type: ignore[no-any-return]

    def copy(self, name: str, new: str) -> None:
        self.meet()
        shutil.copytree(self.disk() / name, self.disk() / new)


def killed_and_resumed(place: Place) -> None:
    assert place.run("whole") == 0
    # One more than the limit: until the two meet again, neither knows that the other has the newest.
    assert place.checkpoints("whole") == ["checkpoint-8", "checkpoint-9"]
    held = {path.name for path in (place.disk() / "whole" / "checkpoint-9").iterdir()}
    assert {"model.safetensors", "optimizer.json", f"rank-0000{RANK}.json"} <= held
    assert f"rank-0000{1 - RANK}.json" not in held, "each disk has the files of its own ranks"
    code = place.run("killed", kill("on_step_end", 5, only_rank=1))
    assert code == KILLED if RANK == 1 else code != 0
    place.copy("killed", "torn")
    assert place.run("killed", resume=True) == 0
    assert place.end("killed") == place.end("whole")


def torn_between_commits(place: Place) -> None:
    """Node 0 has the newer checkpoint, node 1 was killed before its rename: what both have is unchanged."""

    def before(self: Files, operation: str, path: Path) -> None:
        if RANK == 1 and (operation, path.name) == ("rename", "tmp-checkpoint-6"):
            while "checkpoint-6" not in place.checkpoints("torn", rank=0):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "before", before)
        assert place.run("torn", resume=True) != 0
    assert "checkpoint-4" in place.checkpoints("torn")
    assert ("checkpoint-6" in place.checkpoints("torn")) == (RANK == 0)
    place.copy("torn", "damaged")
    assert place.run("torn", resume=True) == 0
    assert place.end("torn") == place.end("whole")
    # They have met since, and nothing of the failed save is left.
    assert place.checkpoints("torn") == ["checkpoint-8", "checkpoint-9"]


def nothing_whole(place: Place) -> None:
    """Of the only checkpoint that both have, one is damaged: both ranks name the disk."""
    if RANK == 1:
        weights = place.disk() / "damaged" / "checkpoint-4" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    place.meet()

    def resume() -> None:
        with pytest.raises(CheckpointError) as caught:
            run(place.disk() / "damaged", CASE, resume=True)
        said = str(caught.value)
        assert "on all 2 nodes" in said
        assert "checkpoint-6 is not on the disk of node 1" in said
        assert "node 1: Can't find a valid checkpoint" in said
        assert "model.safetensors is damaged" in said

    assert place.together(resume) == 0


def other_machines(place: Place) -> None:
    """The disks have changed places; then their folders are copied into one, which anybody can read."""

    def resume() -> None:
        with pytest.raises(CheckpointError) as caught:
            run(place.disk(1 - RANK) / "whole", CASE, resume=True)
        assert "rank-00000.json is missing: this folder has what node 1 of 2 wrote" in str(caught.value)
        assert "copy checkpoint-9 of all of them into one folder" in str(caught.value)

    assert place.together(resume) == 0
    joined = place.root / "joined"
    if RANK == 0:
        for disk in (0, 1):
            shutil.copytree(place.disk(disk) / "whole", joined, dirs_exist_ok=True, ignore=LOCK)
    place.meet()

    def resume_joined() -> None:
        trainer = run(joined, CASE, resume=True)
        assert trainer.state.global_step == 9
        assert bits(trainer) == place.end("whole")["bits"]

    assert place.together(resume_joined) == 0


def sharded(place: Place) -> None:
    """Each disk has the rows of its own rank; whole tensors would lie on the first disk alone."""
    assert place.run("sharded", **SHARDED) == 0
    held = {path.name for path in (place.disk() / "sharded" / "checkpoint-9").iterdir()}
    assert {"model.parts.json", f"model-rank-0000{RANK}.safetensors"} <= held
    assert f"model-rank-0000{1 - RANK}.safetensors" not in held
    weights = place.disk() / "sharded" / "checkpoint-9" / f"model-rank-0000{RANK}.safetensors"
    trained = weights.read_bytes()
    shutil.rmtree(weights.parent)
    assert place.run("sharded", resume=True, **SHARDED) == 0
    assert weights.read_bytes() == trained, "gone on from step 8"
    if RANK == 0:
        for disk in (0, 1):
            shutil.copytree(
                place.disk(disk) / "sharded", place.root / "joined_sharded", dirs_exist_ok=True, ignore=LOCK
            )

    def gathered() -> None:
        whole = {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
        with pytest.raises(ConfigError, match=r"output_dir lies on 2 disks.*use SHARDED_STATE_DICT"):
            run(place.disk() / "gathered", CASE, **{**SHARDED, **whole})
        with pytest.raises(ConfigError, match=r"save_on_each_node=True.*on the first process alone"):
            run(place.disk() / "gathered", CASE, **SHARDED, save_on_each_node=True)

    assert place.together(gathered) == 0


def remote(place: Place) -> None:
    """Output folders behind a URL: the staging folders lie on the disks of the ranks, or on one that they share."""
    url = f"file://{place.root}/bucket/run"

    def train(staging: Path, url: str, resume: bool = False) -> int:
        def work() -> None:
            os.environ["WINDLASS_STAGING"] = str(staging)
            callbacks = [] if resume else [kill("on_step_end", 6)]
            # The folder of `run` becomes `output_dir`: a path would lose one of the URL's slashes.
            trainer = run(url, CASE, *callbacks, resume=resume)  # type: ignore[arg-type]
            assert bits(trainer) == place.end("whole")["bits"]

        return place.together(work)

    assert train(place.disk() / "first", url) != 0
    bucket = place.root / "bucket" / "run"
    assert {"node-00000", "node-00001"} <= {path.name for path in bucket.iterdir()}
    assert list((bucket / f"node-0000{RANK}").glob(f"checkpoint-*/rank-0000{RANK}.json"))
    assert train(place.disk() / "fresh", url, resume=True) == 0
    shared = place.root / "staging"
    assert train(shared / "first", f"{url}-shared") != 0
    assert train(shared / "fresh", f"{url}-shared", resume=True) == 0

    def other_number_of_disks() -> None:
        os.environ["WINDLASS_STAGING"] = str(shared / "third")
        with pytest.raises(CheckpointError, match="written by machines with disks of their own"):
            run(url, CASE, resume=True)  # type: ignore[arg-type]

    assert place.together(other_number_of_disks) == 0


def main(folder: Path) -> None:
    place = Place(folder)
    place.disk().mkdir()
    killed_and_resumed(place)
    torn_between_commits(place)
    nothing_whole(place)
    other_machines(place)
    sharded(place)
    remote(place)
