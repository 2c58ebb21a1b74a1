"""Run on two ranks: training without logits, replicated and sharded, compared with one process that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.lean_cases import losses, model_of, train

from windlass.callbacks.run_record import read_record
from windlass.dist.sharded import whole


def main(folder: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "ddp, experts": {"family": "experts"},
        "fsdp, tied": {"family": "tied", "fsdp": True, "fsdp_config": {"version": 2}},
        "fsdp, pairs": {"family": "pairs", "fsdp": True, "fsdp_config": {"version": 2}},
    }
    for name, options in cases.items():
        # Two ranks with one micro-batch each see the rows of one process with two.
        runs = {}
        for lean in (True, False):
            family = options.get("family", "causal")
            rest = {key: value for key, value in options.items() if key != "family"}
            out = folder / f"{name} {lean}"
            trainer = train(
                out, family, model=model_of(family), gradient_accumulation_steps=1, lean_loss=lean, **rest
            )
            trainer.accelerator.wait_for_everyone()
            runs[lean] = losses(trainer), [whole(p.detach()) for p in trainer.model.parameters()]
            record = read_record(out)
            assert record is not None
            assert record["loss"]["without_logits"] is lean, name
        torch.testing.assert_close(runs[True], runs[False], rtol=1e-6, atol=1e-6, msg=name)
