from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError
from windlass.search.space import Categorical, Float, Int, Trial, declared


@given(st.integers(0, 10**6), st.floats(1e-6, 1e3), st.floats(1.0, 1e3))
def test_samples_lie_within_their_bounds(seed: int, low: float, factor: float) -> None:
    high, generator = low * factor, random.Random(seed)
    for distribution in (Float(low, high), Float(low, high, log=True), Float(low, high, step=low)):
        assert low <= distribution.sample(generator) <= high * (1 + 1e-12)
    whole = Int(1, 1 + seed % 50)
    logarithmic = Int(1, 1 + seed % 50, log=True)
    assert all(1 <= one.sample(generator) <= one.high for one in (whole, logarithmic))


def test_a_logarithmic_float_is_uniform_by_its_logarithm() -> None:
    drawn = [Float(1e-4, 1.0, log=True).sample(random.Random(seed)) for seed in range(2000)]
    shares = [sum(10**low <= value < 10 ** (low + 1) for value in drawn) / 2000 for low in range(-4, 0)]
    assert shares == pytest.approx([0.25] * 4, abs=0.04)


def test_points_of_a_grid() -> None:
    assert Float(0.1, 0.3, step=0.1).points() == [0.1, 0.2, 0.3]  # 0.1 + 2 * 0.1 would be above
    assert [*Int(2, 9, step=3).points()] == [2, 5, 8]
    assert Float(0, 1).points() == []


def test_a_seed_is_drawn_from_all_seeds() -> None:
    """A list of them would not fit into memory."""
    seeds = Int(0, 2**64 - 1)
    drawn = {seeds.sample(random.Random(number)) for number in range(8)}
    assert len(drawn) == 8
    assert max(drawn) > 2**60


def test_a_small_step_is_drawn_from_all_its_numbers() -> None:
    small = Float(0.0, 1.0, step=1e-12)
    assert len({small.sample(random.Random(number)) for number in range(8)}) == 8
    few = Float(0.1, 0.3, step=0.1)
    for number in range(20):  # the same draw as from a list of them
        assert few.sample(random.Random(number)) == random.Random(number).choice(few.points())


def test_a_name_is_suggested_once() -> None:
    trial = Trial(0, lambda name, distribution: distribution.sample(random.Random(1)))
    first = trial.suggest_float("lr", 0, 1)
    assert trial.suggest_float("lr", 0, 1) == first
    assert trial.params == {"lr": first}


def test_a_space_may_be_data() -> None:
    space: dict[str, Any] = {
        "optim": ["adamw_torch", "lion"],
        "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
        "num_train_epochs": {"low": 1, "high": 3},
    }
    assert declared(space) == {
        "optim": Categorical(("adamw_torch", "lion")),
        "learning_rate": Float(1e-5, 1e-3, log=True),
        "num_train_epochs": Int(1, 3),
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "a fixed value is an argument"),
        ([], "at least one value"),
        ({"low": 1}, "low and high"),
        ({"low": 1, "hgih": 2}, "did you mean 'high'"),
        ({"low": 2, "high": 1}, "low must be at most high"),
        ({"low": 0.1, "high": 10**400}, "too large"),
        ({"low": 0.1, "high": 1.0, "log": "false"}, "log must be true or false, not 'false'"),
        ({"low": 0.0, "high": 1.0, "log": True}, "above 0"),
        ({"low": 0.0, "high": math.inf, "step": 1}, "must be finite"),
        ({"low": 0.0, "high": math.pi, "step": -1.0}, "step must be above 0"),
        ({"low": 1.0, "high": 8.0, "step": 1, "log": True}, "log=True has no step"),
    ],
)
def test_what_is_not_a_space_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declared({"x": given})
