"""Rates and utilisation."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch

from windlass.metrics import speed
from windlass.metrics.speed import model_flops_utilisation, peak_flops, speed_metrics, training_flops


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


def test_utilisation_of_a_billion_parameters() -> None:
    per_token = training_flops(1_000_000_000, 1)
    assert per_token == 6e9
    assert model_flops_utilisation(50_000, per_token, 1e15) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="peak_flops=0 must be positive"):
        model_flops_utilisation(1, 1, 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("A toaster", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_no_name_hides_behind_its_own_beginning() -> None:
    names = [name for name, _ in speed.PEAK_FLOPS]
    assert [peak_flops(name) for name in names] == [peak for _, peak in speed.PEAK_FLOPS]


def test_a_cpu_has_no_peak_in_the_table() -> None:
    assert peak_flops(torch.device("cpu")) is None
