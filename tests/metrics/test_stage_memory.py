"""Memory of the stages of a Trainer, in a fresh process, so that the memory of earlier tests is not in the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import run_script

from windlass.metrics.stage_memory import StageMemory

MIB = 2**20
STAGES = """
import json, torch
from windlass.metrics.stage_memory import StageMemory
def bytes_of(mib): return torch.ones(mib * 2**18)
bytes_of(1)  # the first tensor of a process loads parts of the library
memory = StageMemory(torch.device("cpu"))
memory.begin("init")
kept = bytes_of(64)
nothing = memory.end("init")
memory.begin("train")
memory.begin("eval", within=True)
inner = memory.end("eval")
held = bytes_of(192)
del held
train = memory.end("train")
memory.begin("eval")
del kept
print(json.dumps([nothing, inner, train, memory.end("eval")]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of the process is counted on Linux")
def test_each_stage_has_what_it_kept_and_what_it_took_in_between(tmp_path: Path) -> None:
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    nothing, inner, train, evaluation = json.loads(run_script(script))
    assert nothing == inner == {}
    assert train.keys() == {
        "before_init_mem_cpu", "init_mem_cpu_alloc_delta", "init_mem_cpu_peaked_delta", "train_mem_cpu_alloc_delta",
        "train_mem_cpu_peaked_delta",
    }  # fmt: skip
    assert 56 * MIB < train["init_mem_cpu_alloc_delta"] < 72 * MIB
    assert abs(train["train_mem_cpu_alloc_delta"]) < 16 * MIB
    assert 176 * MIB < train["train_mem_cpu_peaked_delta"] < 208 * MIB
    assert evaluation.keys() == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}
    assert evaluation["eval_mem_cpu_alloc_delta"] < -56 * MIB
    assert 56 * MIB < evaluation["eval_mem_cpu_peaked_delta"] < 72 * MIB


def test_a_stage_that_was_broken_off_is_forgotten() -> None:
    memory = StageMemory(torch.device("cpu"))
    memory.begin("train")
    memory.begin("eval")
    assert memory.end("train") == {}
    found: dict[str, Any] = memory.end("eval")
    assert all(name.startswith("eval_mem") for name in found)
