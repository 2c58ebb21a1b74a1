"""Prints what this process's launcher and arguments come to, for the tests of launchers."""

from __future__ import annotations

import json
import os

from windlass import TrainingArguments
from windlass.assemble.resolve import resolve_parallel
from windlass.core.world import world_from_environment


def main() -> None:
    world = world_from_environment()
    plan = resolve_parallel(TrainingArguments("out"), world)
    shard = plan.dist.shard
    origins = {name: said.origin for name, said in plan.settings.items() if not said.implicit}
    told = {
        "strategy": plan.dist.strategy,
        "layers": shard and shard.layers,
        "compute": plan.precision.compute,
        "cpu": plan.use_cpu,
        "rank": world.rank,
        "size": world.size,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "origins": origins,
    }
    print(f"PLAN {json.dumps(told)}", flush=True)


main()
