"""Run on ranks: kills a run of this world at the steps given, one after another, and resumes it.

Every run is a child of the launched process, because it is killed; the children meet over a file of their own. One rank
is killed at a time, in turn; the others lose their connection to it, as they would on a cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.trainer.resume_cases import KILLED, Case, bits, in_a_child, kill, run

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# 36 samples: updates of 8 for two ranks (the last one of 4), of 12 for three.
# A run that is killed in an update resumes from the one before, which must stand by then.
CASE = Case(
    {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "eval_strategy": "epoch",
        "save_in_background": False,
    }
)


def together(folder: Path, meeting: str, work: Callable[[], Any]) -> int:
    def meet_and_work() -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting-{meeting}",
            rank=RANK,
            world_size=WORLD,
            timeout=timedelta(seconds=60),
        )
        work()
        dist.destroy_process_group()

    return in_a_child(meet_and_work)


def report(folder: Path, name: str, **how: Any) -> None:
    trainer = run(folder / name, CASE, **how)
    said = {"bits": bits(trainer), "step": trainer.state.global_step, "seen": trainer.model.seen}
    (folder / f"{name}-{RANK}.json").write_text(json.dumps(said))


def main(folder: Path, steps: list[int]) -> None:
    assert together(folder, "whole", lambda: report(folder, "whole")) == 0
    for step in steps:
        victim = step % WORLD
        killer = kill("on_step_end", step, only_rank=victim)
        how = {"resume": None if step == steps[0] else True}
        code = together(
            folder, f"killed-{step}", lambda d=killer, h=how: run(folder / "killed", CASE, d, **h)
        )
        assert code == KILLED if victim == RANK else code != 0, f"step {step}, rank {RANK}: {code}"
    assert together(folder, "resumed", lambda: report(folder, "killed", resume=True)) == 0
