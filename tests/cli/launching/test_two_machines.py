"""`windlass launch` on each of two machines."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.launching.machines import free_port, launch_on_both, start_there, two_machines
from tests.dist.launch import end_all
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback

SCRIPT = Path(__file__)


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_whose_worker_was_killed_starts_again_and_ends_with_the_right_weights(tmp_path: Path) -> None:
    codes, said = launch_on_both("--max_restarts", 1, SCRIPT, tmp_path / "two")
    assert codes == [0, 0], "\n".join(said)
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


# As guides print it, but for the address, the port, the number of processes, and the CPU.
FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0 #change rank as per the node
main_process_ip: 192.168.20.1
main_process_port: 9898
main_training_function: main
mixed_precision: 'no'
num_machines: 2
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
RANKS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (int(os.environ["RANK"]), "WINDLASS_RDZV_TOKEN" in os.environ))
dist.destroy_process_group()
print("together:", found)
"""


@pytest.mark.dist
@pytest.mark.parametrize("token", [None, pytest.param("a-secret-of-both-machines", marks=pytest.mark.slow)])
def test_the_file_that_guides_print_starts_two_machines_with_a_token_or_without(
    tmp_path: Path, token: str | None
) -> None:
    script, port = tmp_path / "ranks.py", str(free_port())
    script.write_text(RANKS)
    environ = {} if token is None else {"WINDLASS_RDZV_TOKEN": token}
    with two_machines() as machines:
        jobs = []
        for rank, machine in enumerate(machines):
            file = tmp_path / f"{rank}.yaml"
            text = FILE.replace("rank: 0", f"rank: {rank}").replace("192.168.20.1", machines[0].address)
            file.write_text(text.replace("9898", port))
            jobs.append(start_there(machine, "--config_file", file, script, environ=environ))
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                end_all(job)
    ranks = [(rank, False) for rank in range(2)]  # the secret is not handed to them
    on_loopback = machines[0].address.startswith("127.")
    for job, text in zip(jobs, said, strict=True):
        assert (job.returncode, text.count(f"together: {ranks}")) == (0, 1), text
        assert text.count("the job has no secret") == int(token is None and not on_loopback)
    assert f"{port}, with{'' if token else 'out'} a token" in said[0]


# --- what each rank runs ----------------------------------------------------------------------------------------------


UPDATES, SAMPLES, UPDATE_SIZE = 8, 24, 8


class KilledOnce(TrainerCallback):
    """Rank 1 is killed in update 5, unless it has been before."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 5 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, world: int) -> Trainer:
    args = arguments(
        folder, max_steps=UPDATES, save_strategy="steps", save_steps=2, logging_steps=1,
        per_device_train_batch_size=UPDATE_SIZE // world,
    )  # fmt: skip
    dataset = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    trainer = Trainer(
        Net().double(), args, train_dataset=dataset, callbacks=[KilledOnce(folder / "killed-once")]
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    print(f"rank {os.environ['RANK']} of machine {os.environ['GROUP_RANK']}", flush=True)
    train(Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
