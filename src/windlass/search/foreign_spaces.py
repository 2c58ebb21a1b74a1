"""Spaces in the words of Ray Tune and of sweeps of Weights & Biases; their values are chosen without a service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from windlass.core.errors import ConfigError, Problem
from windlass.search.space import Categorical, Distribution, Float, Int, Trial, checked


class _Domain:
    """A domain of Ray Tune as a distribution."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain

    def sample(self, generator: Any) -> Any:
        value = self._domain.sample(random_state=np.random.default_rng(generator.getrandbits(64)))
        return value.item() if isinstance(value, np.generic) else value

    def points(self) -> list[Any]:
        return list(getattr(self._domain, "categories", ()))


def ray_values(trial: Trial, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trial for a space of Ray Tune; what is neither a domain nor a grid is a fixed value."""
    values = {}
    for name, given in space.items():
        if isinstance(given, Mapping) and set(given) == {"grid_search"}:
            values[name] = trial.suggest_categorical(name, given["grid_search"])
        elif hasattr(given, "sample"):
            values[name] = trial.suggest(name, _Domain(given))  # type: ignore[arg-type]
        else:
            values[name] = given
    return values


def sweep_space(sweep: Mapping[str, Any]) -> dict[str, Distribution]:
    """Return the distributions of a sweep's configuration. Raises ConfigError for those that are not known."""
    found, problems = {}, []
    for name, given in sweep.get("parameters", sweep).items():
        distribution = _of_sweep(given)
        if distribution is None:
            known = "value, values, or min and max with uniform, int_uniform, q_uniform or log_uniform_values"
            problems.append(
                Problem(f"hp_space.parameters.{name}", given, f"is not understood; known: {known}")
            )
        else:
            found[name] = checked(name, distribution)
    if problems:
        raise ConfigError(problems)
    return found


def _of_sweep(given: Any) -> Distribution | None:
    if not isinstance(given, Mapping):
        return None
    if "values" in given or "value" in given:
        return Categorical(tuple(given.get("values", (given.get("value"),))))
    if "min" not in given or "max" not in given:
        return None
    low, high = given["min"], given["max"]
    is_whole = isinstance(low, int) and isinstance(high, int)
    match given.get("distribution", "int_uniform" if is_whole else "uniform"):
        case "uniform":
            return Float(float(low), float(high))
        case "int_uniform":
            return Int(int(low), int(high))
        case "q_uniform":
            return Float(float(low), float(high), float(given.get("q", 1)))
        case "log_uniform_values":
            return Float(float(low), float(high), log=True)
        case "log_uniform":
            return Float(math.exp(low), math.exp(high), log=True)
    return None
