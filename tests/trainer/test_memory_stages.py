"""Memory of a script's stages. Figures come from a fresh process: one that ran other tests has memory to reuse."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import run_script
from transformers.trainer_utils import TrainerMemoryTracker as Reference

from windlass.trainer.memory_stages import TrainerMemoryTracker

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of the process is counted on Linux")
MIB = 2**20


class Script:
    """A class of a script that measures its methods."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.tracker.start()
        self.kept: list[Any] = []
        self.tracker.stop_and_update_metrics()

    def train(self) -> dict[str, Any]:
        self.tracker.start()
        metrics: dict[str, Any] = {}
        self.kept.append(bytearray(b"x") * (64 * 2**20))
        self.evaluate()
        passing = bytearray(b"x") * (128 * 2**20)
        del passing
        self.tracker.stop_and_update_metrics(metrics)
        return metrics

    def evaluate(self) -> dict[str, Any]:
        self.tracker.start()
        metrics: dict[str, Any] = {}
        self.tracker.stop_and_update_metrics(metrics)
        return metrics

    def other(self) -> None:
        self.tracker.start()


def in_fresh_process(folder: Path) -> list[dict[str, int]]:
    """What training, and then an evaluation, report."""
    program = f"""
import json
from typing import Any
from {TrainerMemoryTracker.__module__} import TrainerMemoryTracker
{inspect.getsource(Script)}
script = Script(TrainerMemoryTracker())
print(json.dumps([script.train(), script.evaluate()]))
"""
    script = folder / "script.py"
    script.write_text(program)
    found: list[dict[str, int]] = json.loads(run_script(script).splitlines()[-1])
    return found


@on_linux
def test_stages_are_measured_under_the_names_of_the_reference(tmp_path: Path) -> None:
    train, evaluation = in_fresh_process(tmp_path)
    assert 56 * MIB < train["train_mem_cpu_alloc_delta"] < 100 * MIB
    assert 100 * MIB < train["train_mem_cpu_peaked_delta"] < 140 * MIB
    names = {
        f"{stage}_mem_cpu_{figure}_delta" for stage in ("init", "train") for figure in ("alloc", "peaked")
    }
    assert set(train) == names | {"before_init_mem_cpu"}
    assert set(evaluation) == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}
    if not Reference().skip_memory_metrics:  # it needs psutil
        assert set(Script(Reference()).train()) == set(train)


def test_a_stage_within_another_is_not_measured() -> None:
    script = Script(TrainerMemoryTracker())
    script.tracker.stages = {
        **TrainerMemoryTracker.stages,
        "test_a_stage_within_another_is_not_measured": "own",
    }
    script.tracker.start()
    assert script.evaluate() == {}
    assert script.tracker.cur_stage == ("own" if sys.platform == "linux" else None)


def test_nothing_is_measured_if_it_is_not_asked_for() -> None:
    script = Script(TrainerMemoryTracker(skip_memory_metrics=True))
    assert script.train() == {}


def test_a_stage_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="this one is named other"):
        Script(TrainerMemoryTracker()).other()
