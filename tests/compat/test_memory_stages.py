from __future__ import annotations

import sys
from typing import Any

import pytest
from transformers.trainer_utils import TrainerMemoryTracker as Reference

from windlass.compat.memory_stages import TrainerMemoryTracker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
MIB = 1 << 20


class Script:
    """A class of a script that measures its methods."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.tracker.start()
        self.kept: list[bytearray] = []
        self.tracker.stop_and_update_metrics()

    def train(self) -> dict[str, Any]:
        self.tracker.start()
        metrics: dict[str, Any] = {}
        self.kept.append(bytearray(b"x") * (64 * MIB))
        self.evaluate()
        passing = bytearray(b"x") * (128 * MIB)
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


def test_stages_are_measured_under_the_names_of_the_reference() -> None:
    script = Script(TrainerMemoryTracker())
    metrics = script.train()
    assert 60 * MIB < metrics["train_mem_cpu_alloc_delta"] < 100 * MIB
    assert "eval" not in script.tracker.cpu, "a stage within another is not measured"
    names = {
        f"{stage}_mem_cpu_{figure}_delta" for stage in ("init", "train") for figure in ("alloc", "peaked")
    }
    assert set(metrics) == names | {"before_init_mem_cpu"}
    assert set(script.evaluate()) == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}
    theirs = Script(Reference())
    if not theirs.tracker.skip_memory_metrics:  # it needs psutil
        assert set(theirs.train()) == set(metrics)


def test_a_peak_within_a_stage_is_seen() -> None:
    class Peaking(Script):
        def predict(self) -> dict[str, Any]:
            self.tracker.start()
            block = bytearray(b"x") * (256 * MIB)
            for start in range(0, len(block), 4096):  # long enough for the watching thread
                block[start] = 1
            del block
            metrics: dict[str, Any] = {}
            self.tracker.stop_and_update_metrics(metrics)
            return metrics

    metrics = Peaking(TrainerMemoryTracker()).predict()
    assert metrics["test_mem_cpu_peaked_delta"] > 100 * MIB


def test_nothing_is_measured_if_it_is_not_asked_for() -> None:
    script = Script(TrainerMemoryTracker(skip_memory_metrics=True))
    assert script.train() == {}
    assert script.tracker.cpu == {}


def test_a_stage_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="this one is named other"):
        Script(TrainerMemoryTracker()).other()
