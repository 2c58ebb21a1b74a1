"""Run on ranks: models with state of their own, replicated and sharded, stopped and continued."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tests.trainer.odd_tensors import Odd
from tests.trainer.own_state_cases import Copied, Growing, Normed, Partial, Renamed, Scaled, fit, own_tensors
from torch import nn

from windlass.core.errors import ModelError, WindlassError
from windlass.core.tensors import bits_of
from windlass.dist.sharded import whole

RANK = int(os.environ.get("RANK", 0))
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp own buffers": {"ddp_broadcast_buffers": False},
    "parts": {"fsdp": "full_shard"},
    "whole": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
}
CASES: dict[str, Any] = {
    "copies": Copied,
    "renamed": Renamed,
    "extra": Scaled,
    "normed": Normed,
    "growing": Growing,
    "odd": Odd,
    "odd unsaved": lambda: Odd(persistent=False, sparse=True),
}


def hexed(model: nn.Module) -> dict[str, str]:
    return {
        name: bits_of(whole(tensor)).numpy().tobytes().hex() for name, tensor in own_tensors(model).items()
    }


def run(folder: Path, strategy: str, case: str) -> dict[str, Any]:
    """What differs between a run that was stopped and one that was not, on this rank; and how it ended."""
    place, build, options = folder / f"{strategy} {case}", CASES[case], STRATEGIES[strategy]
    try:
        clean = hexed(fit(build(), place, **options).model)
        stopped = hexed(fit(build(), place, resume=str(place / "checkpoint-3"), **options).model)
    except (WindlassError, RuntimeError) as error:
        if RANK == 0:
            import traceback

            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"differs": [name for name in clean if clean[name] != stopped.get(name)], "ended": clean}


def refused(folder: Path, strategy: str) -> str:
    try:
        fit(Partial(), folder / f"refused {strategy}", **STRATEGIES[strategy])
    except ModelError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    said = {f"{strategy}, {case}": run(folder, strategy, case) for strategy in STRATEGIES for case in CASES}
    refusals = {strategy: refused(folder, strategy) for strategy in ("ddp", "parts")}
    return {"runs": said, "refused": refusals}
