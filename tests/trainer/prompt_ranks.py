"""Run on ranks: learnt prompts on a sharded model, stopped, continued, saved and evaluated."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.adapter_cases import prompted, rows, stretch

from windlass.dist.sharded import is_sharded


def main(folder: Path, sharded: bool) -> None:
    strategy = {"fsdp": "full_shard"} if sharded else {}
    for kind in ("prompt", "prefix", "encoder"):
        whole = stretch(folder / kind / "whole", 3, False, model=prompted(kind), **strategy)
        stretch(folder / kind / "resumed", 2, False, model=prompted(kind), **strategy)
        resumed = stretch(folder / kind / "resumed", 3, True, model=prompted(kind), **strategy)
        assert any(is_sharded(p) for p in resumed.model.parameters()) == sharded
        losses = [trainer.evaluate(rows()[:8])["eval_loss"] for trainer in (whole, resumed)]
        assert losses[0] == losses[1]
        resumed.save_model(str(folder / kind / "final"))
