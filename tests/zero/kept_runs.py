"""Run on ranks: runs under ZeRO and without DeepSpeed that keep the best model, stop early, roll back, or
save in the background; what they came to.

Args: folder, then words KIND:STAGE, with a stage of -1 for none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.background_cases import Noting, SlowDisk
from tests.trainer.small import arguments, rows
from tests.zero.runs import WORLD, Net, config

from windlass import EarlyStoppingCallback, Trainer

KINDS = ("best", "rollback", "background")
_BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def build(kind: str, folder: Path, stage: int) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 9, "logging_steps": 1, "weight_decay": 0.1, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4 // WORLD, **_BY_STEPS, **config(stage),
    }  # fmt: skip
    data, callbacks = rows(50), []
    if kind == "best":  # by a metric that gets worse from the first evaluation on
        settings |= {
            "load_best_model_at_end": True,
            "greater_is_better": True,
            "metric_for_best_model": "loss",
        }
        settings |= {"save_total_limit": 2}
        callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    elif kind == "rollback":
        settings |= {"nonfinite_policy": "rollback", "save_steps": 1}
        data[17]["x"] = data[17]["x"] * float("nan")
    else:
        settings |= {"eval_strategy": "no", "save_steps": 3}
    args = arguments(folder, **settings)
    return Noting(Net(), args, train_dataset=data, eval_dataset=rows(11, seed=1), callbacks=callbacks)


def run(kind: str, folder: Path, stage: int) -> dict[str, Any]:
    made = build(kind, folder, stage)
    if kind == "background":
        disk = SlowDisk(until=6)
        made.add_callback(disk)
        with disk:
            made.train()
    else:
        made.train()
    made.save_model()
    state = made.state
    keys = ("loss", "eval_loss", "grad_norm", "rolled_back_to", "updates_undone", "samples_left_out")
    return {
        "log": [[row["step"], key, row[key]] for row in state.log_history for key in keys if key in row],
        "step": state.global_step,
        "best": [state.best_metric, state.best_global_step, Path(state.best_model_checkpoint or "").name],
        "kept": sorted(path.name for path in folder.glob("checkpoint-*")),
        "learned": [learned for _, learned, _ in made.notes] if isinstance(made, Noting) else [],
    }


def main(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
    for word in words:
        kind, stage = word.split(":")
        found[f"{kind}{stage}"] = run(kind, folder / f"{kind}{stage}", int(stage))
    return found
