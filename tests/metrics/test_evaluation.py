"""The parts of an evaluation step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from windlass.core.errors import ConfigError
from windlass.metrics.evaluation import (
    MeanLoss,
    checked_metrics,
    ignored_keys,
    labels_of,
    mean_of,
    split_outputs,
)

ONE, TWO, LOSS = torch.ones(2, 1), torch.ones(2, 2), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("outputs", "has_loss", "loss", "predictions"),
    [
        ({"loss": LOSS, "logits": ONE}, True, LOSS, ONE),
        ({"loss": LOSS, "logits": ONE, "hidden": TWO, "cache": object()}, True, LOSS, (ONE, TWO)),
        ({"logits": ONE, "extra": None}, False, None, ONE),
        ({"loss": LOSS}, True, LOSS, None),
        ((LOSS, ONE), True, LOSS, ONE),
        ((LOSS, ONE, TWO), True, LOSS, (ONE, TWO)),
        ((ONE, TWO), False, None, (ONE, TWO)),
        ([ONE], False, None, ONE),
        (ONE[:1], False, None, ONE[:1]),
    ],
)
def test_outputs_are_divided(outputs: Any, has_loss: bool, loss: Any, predictions: Any) -> None:
    _, got = split_outputs(outputs, has_loss=has_loss, ignore_keys="cache")
    torch.testing.assert_close(got, predictions, rtol=0, atol=0)
    got_loss, got = split_outputs(outputs, has_loss=has_loss, ignore_keys=["cache"])
    assert got_loss is loss if loss is None else got_loss == loss
    assert type(got) is type(predictions)
    torch.testing.assert_close(got, predictions, rtol=0, atol=0)


def test_predictions_hold_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss, logits = split_outputs((weight.sum(), weight * 2), has_loss=True)
    assert not loss.requires_grad
    assert not logits.requires_grad


def test_ignored_keys_come_from_the_config() -> None:
    model = nn.Linear(1, 1)
    assert ignored_keys(model) == []
    model.config = type("Config", (), {})()  # type: ignore[assignment]
    assert ignored_keys(model) == ["past_key_values", "cache"]
    for written_for in ("past_key_values", "cache"):
        model.config.keys_to_ignore_at_inference = [written_for]  # type: ignore[union-attr]
        assert set(ignored_keys(model)) == {"past_key_values", "cache"}
    model.config.keys_to_ignore_at_inference = ["mems"]  # type: ignore[union-attr]
    assert ignored_keys(model) == ["mems"]


def test_labels_are_one_or_several_or_none() -> None:
    batch = {"labels": ONE, "start": TWO, "gone": None}
    assert labels_of(batch, ["labels"]) is not None
    assert isinstance(labels_of(batch, ["labels", "start"]), tuple)
    assert labels_of(batch, ["labels", "gone"]) is None
    assert labels_of(batch, ["absent"]) is None
    assert labels_of(batch, []) is None


@given(
    losses=st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 50)), min_size=1, max_size=20),
    ranks=st.integers(1, 4),
)
def test_the_mean_does_not_depend_on_who_saw_what(losses: list[tuple[float, int]], ranks: int) -> None:
    shares = [MeanLoss() for _ in range(ranks)]
    for index, (loss, weight) in enumerate(losses):
        mean = torch.tensor(loss, dtype=torch.float64) if weight else torch.tensor(math.nan)
        shares[index % ranks].add(mean, weight, 1)
    total = sum(weight for _, weight in losses)
    result = mean_of([share.totals() for share in shares])["loss"]
    if total == 0:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(
            math.fsum(loss * w for loss, w in losses) / total, rel=1e-12, abs=1e-12
        )


def test_many_small_losses_in_low_precision_are_not_lost() -> None:
    mean = MeanLoss()
    for _ in range(5000):
        mean.add(torch.tensor(1.0, dtype=torch.bfloat16), 1.0, 1)
    assert mean_of([mean.totals()]) == {"loss": 1.0}


def test_infinities_of_both_signs_are_nan() -> None:
    shares = [MeanLoss(), MeanLoss()]
    for share, loss in zip(shares, (math.inf, -math.inf), strict=True):
        share.add(torch.tensor(loss), 1.0, 1)
    assert math.isnan(mean_of([share.totals() for share in shares])["loss"])


def test_no_loss_no_metric() -> None:
    mean = MeanLoss()
    mean.add(None, 1.0, 3)
    assert mean_of([mean.totals(), MeanLoss().totals()]) == {}


def test_metrics_must_be_a_dict() -> None:
    with pytest.raises(ConfigError, match="must return a dict"):
        checked_metrics(None)
