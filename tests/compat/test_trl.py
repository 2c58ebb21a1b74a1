"""trl's trainers, unmodified, on this engine: `windlass run` and `windlass launch --compat`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.zero.needed import needs_deepspeed

pytest.importorskip("trl", reason="trl is not installed")
SCRIPT = Path(__file__).parent / "trl_trainers.py"
TRAINERS = ("sft", "dpo", "reward", "kto", "grpo", "rloo")
ASKED = ("dpo_sync", "dpo_metrics", "reward_metrics", "grpo_stream")


def results(*command: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "windlass", *command], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    rows = [
        json.loads(line.removeprefix("RESULT ")) for line in ended.stdout.splitlines() if "RESULT" in line
    ]
    return {row["name"]: row for row in rows}


def check(found: dict[str, Any], names: tuple[str, ...], processes: int) -> None:
    assert tuple(found) == names
    for row in found.values():
        assert "trl" in row["engine"], row["engine"]
        assert row["engine"][-2:] == ["windlass", "builtins"], row["engine"]
        assert (row["steps"], row["processes"]) == (4, processes)
        assert len(row["losses"]) == 2
        assert all(map(math.isfinite, row["losses"]))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Of one process: to import trl takes longer than to train so little."""
    return results("run", str(SCRIPT), *ASKED, *TRAINERS)


def only(found: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row for name, row in found.items() if name in names}


def test_every_trainer_trains_and_saves(found: dict[str, Any]) -> None:
    check(only(found, TRAINERS), TRAINERS, processes=1)
    assert found["reward"]["losses"][1] < found["reward"]["losses"][0]


def test_what_their_trainers_ask_of_an_engine_beside_training(found: dict[str, Any]) -> None:
    """State that a callback reads, a stream without a sampler, labels that `prediction_step` alone returns."""
    check(only(found, ASKED), ASKED, processes=1)
    assert found["dpo_sync"]["reference_moved"]
    assert not found["dpo_metrics"]["reference_moved"]
    assert found["dpo_metrics"]["evaluated"] == [48.0, 48.0], "the two texts of each of 24 pairs"
    assert found["reward_metrics"]["evaluated"] == [24.0, 24.0]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("flags", [(), ("--use_fsdp", "--fsdp_version", "2")], ids=["replicated", "sharded"])
def test_they_train_in_two_processes(flags: tuple[str, ...]) -> None:
    """GRPO and RLOO have a reference model, which they divide themselves."""
    names = ("sft", "dpo", "grpo", "rloo")
    command = ("launch", "--compat", "--use_cpu", "--num_processes", "2", *flags, str(SCRIPT))
    found = results(*command, *names)
    check(found, names, 2)
    assert not found["grpo"]["reference_moved"]


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_reference_model_under_deepspeed(stage: str) -> None:
    """trl makes an engine of its own for the reference model, of the configuration that the accelerator shows."""
    flags = ("--use_cpu", "--num_processes", "2", "--use_deepspeed", "--zero_stage", stage)
    check(results("launch", "--compat", *flags, str(SCRIPT), "dpo"), ("dpo",), 2)
