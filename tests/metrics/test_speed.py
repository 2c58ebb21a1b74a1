"""Rates."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
from torch import nn

from windlass.metrics.speed import ModelFlops, count_flops, speed_metrics


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


def test_a_weight_that_is_computed_is_counted_by_its_parameters() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    computed: list[nn.Module] = []
    layer.parametrizations.weight.register_forward_hook(lambda part, *_: computed.append(part))
    assert count_flops(nn.Sequential(layer)) == ModelFlops(6.0 * (2 + 4 + 2), 0.0)
    assert not computed


def test_a_mixture_whose_configuration_has_no_number_of_chosen_experts_has_no_count() -> None:
    """Each position is multiplied with few of its experts, and all were counted."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=8, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_decoder_layers=1, num_heads=2, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    assert count_flops(transformers.SwitchTransformersForConditionalGeneration(config)) is None
