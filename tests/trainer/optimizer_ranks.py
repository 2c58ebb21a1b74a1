"""Run by `torch.distributed.run`: each optimizer on two ranks, replicated and sharded, continued and compared."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.optimizer_cases import FAMILIES, IN_8_BITS, resumes_to_the_bit, run, weights

from windlass.core.errors import ConfigError

RANK = int(os.environ.get("RANK", 0))
IN_PARTS: dict[str, Any] = {"fsdp": "full_shard"}
WHOLE: dict[str, Any] = {**IN_PARTS, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


def main(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = {"resumed": {}, "near": {}, "refused": {}, "moved": {}}
    for optim in FAMILIES:
        made["resumed"][f"{optim} replicated"] = resumes_to_the_bit(folder / optim / "replicated", optim)
        made["resumed"][f"{optim} in parts"] = resumes_to_the_bit(folder / optim / "parts", optim, **IN_PARTS)
        made["resumed"][f"{optim} whole"] = resumes_to_the_bit(folder / optim / "whole", optim, **WHOLE)
        made["near"][optim] = distance(folder / optim)
    for optim in IN_8_BITS[:1]:
        made["resumed"][f"{optim} replicated"] = resumes_to_the_bit(folder / optim / "replicated", optim)
        try:
            run(folder / optim / "parts", optim, 1, **IN_PARTS)
        except ConfigError as error:
            made["refused"][optim] = str(error)
    made["refused"]["rounding"] = refused_rounding(folder)
    return made


def distance(folder: Path) -> float:
    """The largest difference between weights of a replicated and a sharded run, over their size."""
    name = folder.name
    one = weights(run(folder / "one", name, 4, watched=False))
    other = weights(run(folder / "other", name, 4, watched=False, **IN_PARTS))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


def refused_rounding(folder: Path) -> str:
    try:
        run(folder / "rounding", "adamw_torch_8bit", 1, optim_args="bf16_stochastic_round=True")
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with torch.compiler.set_stance("force_eager"):
        found = main(place)
    shutil.rmtree(place / "none", ignore_errors=True)
    if RANK == 0:
        (place / "made.json").write_text(json.dumps(found))
