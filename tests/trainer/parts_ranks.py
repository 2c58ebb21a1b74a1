"""Run on ranks: streams that split themselves, in runs, in a user's loops, in evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.trainer import parts_cases as cases
from tests.trainer.parts_cases import trainer_for
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.compat.state import AcceleratorState, GradientState
from windlass.core.errors import DataError
from windlass.dist.sharded import whole

FOLDER = Path()  # where the runs are, set by `main`


def run(name: str, stream: Any, resume: str | None = None, **changes: Any) -> dict[str, Any]:
    trainer = trainer_for(FOLDER / name, stream, **changes)
    trainer.train(resume_from_checkpoint=resume)
    logs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = [whole(p.detach()).tolist() for p in trainer.model.parameters()]
    steps = trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch
    return {"seen": trainer.seen, "logs": logs, "weights": weights, "steps": steps}


def in_training() -> dict[str, Any]:
    said = {
        "ByRank": run("by-rank", cases.ByRank(), save_strategy="steps", save_steps=2),
        "ByRankAndWorker": run("by-worker", cases.ByRankAndWorker(), dataloader_num_workers=2),
        "Shuffled": run("shuffled", cases.Shuffled()),
        "Sized": run("sized", cases.Sized(), max_steps=-1, num_train_epochs=2),
        "by_node": run("by-node", cases.ByNode()),
        "accumulating": run("accumulating", cases.ByRank(), gradient_accumulation_steps=2, max_steps=6),
        "sharded": run("sharded", cases.ByRank(), fsdp="full_shard"),
        "ReadOnce": run("once", cases.ReadOnce(), max_steps=6),
    }
    for step in (2, 6, 10):
        resumed = str(FOLDER / "by-rank" / f"checkpoint-{step}")
        said[f"resumed-{step}"] = run(f"resumed-{step}", cases.ByRank(), resumed)
    return said


def evaluated(stream: Any, **changes: Any) -> list[float]:
    found: list[float] = []

    def measure(prediction: Any) -> dict[str, float]:
        found.extend(prediction.label_ids.tolist())
        return {"count": float(len(prediction.label_ids))}

    trainer = trainer_for(FOLDER / "evaluated", None, eval_dataset=stream, compute_metrics=measure, **changes)
    metrics = trainer.evaluate()
    assert metrics["eval_count"] == len(found)
    return [metrics["eval_loss"], *sorted(found)]


def own_loop(stream: Any, batch_size: int | None = 2, **settings: Any) -> list[list[int]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    loader = accelerator.prepare(DataLoader(stream, batch_size=batch_size))
    return [
        [
            i
            for batch in loader
            if not loader.is_filler
            for i in ([batch["index"]] if batch_size is None else batch["index"].tolist())
        ]
        for _ in range(2)
    ]


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except DataError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> dict[str, Any]:
    global FOLDER
    FOLDER = folder
    trainer = trainer_for(FOLDER / "first", cases.Whole())  # opens the process group
    said = in_training()
    said["evaluated"] = [
        evaluated(cases.Whole()),
        evaluated(cases.ByRank()),
        evaluated(cases.ByNode()),
        evaluated(cases.NothingForTheLast()),
    ]
    said["loops"] = [
        own_loop(cases.Whole()),
        own_loop(cases.ByRank()),
        own_loop(cases.ByRankAndWorker()),
        own_loop(cases.ByRank(), batch_size=None),
    ]
    said["refused"] = {
        "random": refused(lambda: run("random", cases.OfItsOwnRandomness())),
        "random loop": refused(lambda: own_loop(cases.OfItsOwnRandomness())),
        "random evaluation": refused(lambda: evaluated(cases.OfItsOwnRandomness())),
        "ends early": refused(lambda: run("early", cases.EndsEarly())),
        "nothing": refused(lambda: run("nothing", cases.NothingForTheLast())),
        "nothing loop": refused(lambda: own_loop(cases.NothingForTheLast())),
    }
    dist.barrier()
    trainer.end()
    return said
