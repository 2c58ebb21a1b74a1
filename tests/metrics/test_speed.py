"""Rates."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest

from windlass.metrics.speed import speed_metrics


@pytest.mark.parametrize(
    "counts",
    [{}, {"num_samples": 30}, {"num_samples": 30, "num_steps": 7, "num_tokens": 1000}, {"num_steps": 0}],
)
def test_names_and_values_are_transformers(counts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    monkeypatch.setattr(time, "time", lambda: 103.2)
    assert speed_metrics("train", 100.0, **counts) == utils.speed_metrics("train", 100.0, **counts)


def test_no_time_gives_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert speed_metrics("eval", 100.0, num_samples=3) == {"eval_runtime": 0.0}


def test_the_arguments_follow_one_another_as_scripts_pass_them() -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    ours, theirs = (list(inspect.signature(f).parameters) for f in (speed_metrics, utils.speed_metrics))
    assert ours[1:] == theirs[1:]
