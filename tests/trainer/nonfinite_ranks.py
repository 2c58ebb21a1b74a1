"""Run on ranks: one rank's sample is not finite; what every rank did about it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.trainer.nonfinite_cases import Weights, faulty_on_both_ranks, trainer_for

from windlass.core.errors import NonFiniteError
from windlass.dist.sharded import whole

BOTH: dict[str, dict[str, Any]] = {
    "data": {"fault": math.nan, "column": 1},
    "data, accumulated": {"fault": math.nan, "column": 1, "gradient_accumulation_steps": 2},
    "data, sharded": {"fault": math.inf, "column": 1, "fsdp": "full_shard"},
    "data, skipped": {"fault": math.nan, "column": 1, "nonfinite_policy": "skip"},
    "loss": {"fault": 1000.0, "column": 0},
    "loss, accumulated": {"fault": 1000.0, "column": 0, "gradient_accumulation_steps": 2},
    "gradient": {"fault": -1000.0, "column": 0},
}


def on_both_ranks(folder: Path, **case: Any) -> str:
    """What is reported of two faulty samples in one update, each on a rank of its own."""
    trainer = faulty_on_both_ranks(folder, **case, save_strategy="no")
    try:
        trainer.train()
    except NonFiniteError as error:
        return str(error)
    return next(row["reason"] for row in trainer.state.log_history if "skipped_update" in row)


def main(folder: Path) -> dict[str, Any]:
    watcher = Weights()
    trainer = trainer_for(folder / "skip", float("nan"), watcher, nonfinite_policy="skip")
    trainer.train()
    said = {"after": watcher.after, "skipped": trainer.state.log_history[-2].get("skipped_updates")}
    roller = trainer_for(
        folder / "roll", float("nan"), Weights(), nonfinite_policy="rollback", save_steps=2, max_steps=6
    )
    said["rolled"] = roller.train().global_step, roller.model.layer.weight.tolist()
    said["window"] = [row["rolled_back_to"] for row in roller.state.log_history if "rolled_back_to" in row]
    sharded = trainer_for(
        folder / "sharded",
        float("nan"),
        None,
        nonfinite_policy="rollback",
        save_steps=2,
        max_steps=6,
        fsdp="full_shard",
    )
    said["sharded"] = sharded.train().global_step, whole(sharded.model.layer.weight).tolist()
    said["told"] = [row["reason"] for row in sharded.state.log_history if "rolled_back_to" in row]
    raiser = trainer_for(folder / "raise", float("nan"), Weights())
    try:
        raiser.train()
    except NonFiniteError as error:
        said["error"] = str(error)
    said["both"] = {name: on_both_ranks(folder / name, **case) for name, case in BOTH.items()}
    trainer.end()
    return said
