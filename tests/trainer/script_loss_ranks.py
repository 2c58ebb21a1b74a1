"""Run by `torch.distributed.run`: losses of scripts, in the splits of the update that this world has;
or runs that are resumed at each update."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.trainer.script_loss_cases import (
    SPLITS,
    UNCLEAR,
    Complete,
    Distilling,
    Growing,
    resumed_at_each_update,
    run,
    run_loop,
    saving,
)  # fmt: skip

from windlass import ModelError, Trainer


def end_of(cls: type[Trainer], place: Path) -> str:
    """What ends its training: "trained", or the words of the error."""
    trainer = saving(cls, place / cls.__name__, save_strategy="no", max_steps=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    try:
        trainer.train()
    except ModelError as error:
        assert all(map(torch.equal, before, trainer.model.parameters())), "refused, but trained"
        return str(error)
    return "trained"


def main() -> None:
    torch.set_default_dtype(torch.float64)
    place, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    if sys.argv[2] == "resume":
        for cls in (Growing, Distilling, Complete):
            runs = resumed_at_each_update(cls, place / cls.__name__)
            (place / f"{cls.__name__}.json").write_text(json.dumps(runs))
        return
    if sys.argv[2] == "refused":
        for cls in UNCLEAR:
            (place / f"{cls.__name__}.txt").write_text(end_of(cls, place))
        return
    outcomes = []
    for way, kind, factor, accumulation in json.loads(sys.argv[2]):
        split = next(split for split in SPLITS[world] if split[1] == accumulation)
        found = (
            {"weights": run_loop(kind, factor, *split)}
            if way == "loop"
            else run(way, kind, factor, place / "run", *split)
        )
        outcomes.append(found)
    (place / f"rank{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
