"""Run by `torch.distributed.run`: one rank's sample is not finite; what every rank did about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.trainer.nonfinite_cases import Weights, trainer_for

from windlass.core.errors import NonFiniteError
from windlass.dist.sharded import whole


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
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
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    trainer.end()


if __name__ == "__main__":
    main()
