"""Run by `torch.distributed.run`: each optimizer on two ranks, replicated and sharded, continued and compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.optimizer_cases import FAMILIES, IN_8_BITS, resumes_to_the_bit, run, weights

from windlass.core.errors import ConfigError

# Those whose states are not all of their parameters' shapes, and one with two modes.
GATHERED = ("adafactor", "schedule_free_adamw", "adamw_torch_8bit", "adamw_torch_4bit")
RANK = int(os.environ.get("RANK", 0))
IN_PARTS: dict[str, Any] = {"fsdp": "full_shard"}
WHOLE: dict[str, Any] = {**IN_PARTS, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


def main(folder: Path, some: list[str]) -> dict[str, Any]:
    """What happened to runs with all optimizers, or sharded ones with `some`."""
    made: dict[str, Any] = {"resumed": {}, "near": {}, "refused": {}}
    for optim in some or FAMILIES:
        made["resumed"][f"{optim} in parts"] = resumes_to_the_bit(folder / optim / "parts", optim, **IN_PARTS)
        if not some:
            made["near"][optim] = distance(folder / optim)
    for optim in () if some else GATHERED:
        made["resumed"][f"{optim} whole"] = resumes_to_the_bit(folder / optim / "whole", optim, **WHOLE)
    for optim in () if some else (*GATHERED, IN_8_BITS[0]):
        made["resumed"][f"{optim} replicated"] = resumes_to_the_bit(folder / optim / "replicated", optim)
    made["refused"]["8bit"] = refused(folder / "8bit", IN_8_BITS[0], **IN_PARTS)
    made["refused"]["rounding"] = refused(
        folder / "rounding", "adamw_torch_8bit", optim_args="bf16_stochastic_round=True"
    )
    return made


def distance(folder: Path) -> float:
    """The largest difference between weights of a replicated and a sharded run, over their size."""
    name = folder.name
    one = weights(run(folder / "one", name, 4, watched=False))
    other = weights(run(folder / "other", name, 4, watched=False, **IN_PARTS))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


def refused(folder: Path, optim: str, **changes: Any) -> str:
    try:
        run(folder, optim, 1, **changes)
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with torch.compiler.set_stance("force_eager"):
        found = main(place, sys.argv[2:])
    if RANK == 0:
        (place / "made.json").write_text(json.dumps(found))
