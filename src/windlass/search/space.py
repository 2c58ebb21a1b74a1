"""What a trial may choose from, under the names that spaces of optuna use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.errors import ConfigError, Problem, did_you_mean, refuse


@dataclass(frozen=True, slots=True)
class Float:
    """A number between `low` and `high`, both included: uniform, by its logarithm, or in steps from `low`."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def sample(self, generator: random.Random) -> float:
        if self.log:
            exponent = generator.uniform(math.log(self.low), math.log(self.high))
            return min(max(math.exp(exponent), self.low), self.high)
        if self.step is None:
            return generator.uniform(self.low, self.high)
        return self._point(generator.randrange(self._count))  # not of all points: a small step has billions

    def points(self) -> list[float]:
        """The values of a grid; none without a step."""
        return [] if self.step is None else [self._point(number) for number in range(self._count)]

    @property
    def _count(self) -> int:
        # Rounding may make (0.3 - 0.1) / 0.1 a little less than 2.
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def _point(self, number: int) -> float:
        # Rounding may make 0.1 + 2 * 0.1 a little more than 0.3.
        return min(self.low + (self.step or 1) * number, self.high)


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number between `low` and `high`, both included, in steps from `low`."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def sample(self, generator: random.Random) -> int:
        if not self.log:
            return generator.randrange(self.low, self.high + 1, self.step)
        exponent = generator.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5))
        return min(max(round(math.exp(exponent)), self.low), self.high)

    def points(self) -> Sequence[int]:
        """The values of a grid."""
        return range(self.low, self.high + 1, self.step)  # not a list: all seeds are 2^32 numbers


@dataclass(frozen=True, slots=True)
class Categorical:
    """One of several values."""

    choices: tuple[Any, ...]

    def sample(self, generator: random.Random) -> Any:
        return generator.choice(self.choices)

    def points(self) -> list[Any]:
        """The values of a grid."""
        return list(self.choices)


Distribution = Float | Int | Categorical
Choose = Callable[[str, Distribution], Any]


class Trial:
    """One set of hyperparameters while it is chosen. Functions that suggest values for optuna work with it.

    Attributes:
        number: of the trial in its study, from 0.
        params: what was suggested so far, by name.
        distributions: what each value was chosen from.
    """

    def __init__(self, number: int, choose: Choose) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, Distribution] = {}
        self._choose = choose

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number in [low, high]."""
        return float(self.suggest(name, checked(name, Float(low, high, step, log))))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number in [low, high]."""
        return int(self.suggest(name, checked(name, Int(low, high, step, log))))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`."""
        return self.suggest(name, checked(name, Categorical(tuple(choices))))

    def suggest(self, name: str, distribution: Distribution) -> Any:
        """A value of `distribution`; the same one if `name` was suggested before."""
        if name not in self.params:
            self.distributions[name] = distribution
            self.params[name] = self._choose(name, distribution)
        return self.params[name]


def checked(name: str, distribution: Distribution) -> Distribution:
    """Return the distribution. Raises ConfigError if it has no value, or no logarithm."""
    if isinstance(distribution, Categorical):
        problem = None if distribution.choices else "must have at least one value"
    elif not distribution.low <= distribution.high:
        problem = "low must be at most high"
    elif math.inf in (abs(distribution.low), abs(distribution.high)):
        problem = "low and high must be finite"
    elif distribution.log and distribution.low <= 0:
        problem = "low must be above 0 with log=True"
    elif distribution.log and distribution.step != (1 if isinstance(distribution, Int) else None):
        problem = "log=True has no step; leave one of the two out"
    else:
        problem = None if distribution.step is None or distribution.step > 0 else "step must be above 0"
    if problem is not None:
        raise ConfigError(Problem(f"hp_space.{name}", distribution, problem))
    return distribution


def declared(space: Mapping[str, Any]) -> dict[str, Distribution]:
    """Return the distributions of a space that is written as data.

    Args:
        space: name -> a list of values, or a mapping with `low` and `high`, and optionally `step` and `log`. Two whole
            numbers are the ends of a range of whole numbers.

    Raises:
        ConfigError: with every entry that is neither.
    """
    found, problems = {}, []
    for name, given in space.items():
        try:
            found[name] = checked(name, _declared(given))
        except ConfigError as error:
            problems += error.problems
        except (TypeError, ValueError, OverflowError) as error:
            problems.append(Problem(f"hp_space.{name}", given, str(error)))
    refuse(problems)
    return found


def _declared(given: Any) -> Distribution:
    if isinstance(given, Float | Int | Categorical):
        return given
    if isinstance(given, list | tuple):
        return Categorical(tuple(given))
    if not isinstance(given, Mapping):
        raise ValueError(
            "must be a list of values, or {low: ..., high: ...}; a fixed value is an argument, not a space"
        )
    known = ("low", "high", "step", "log")
    for key in given:
        if key not in known:
            raise ValueError(f"{key!r} is not one of {', '.join(known)}{did_you_mean(str(key), known)}")
    if "low" not in given or "high" not in given:
        raise ValueError("must have low and high")
    low, high, step, log = given["low"], given["high"], given.get("step"), given.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"log must be true or false, not {log!r}")
    if all(isinstance(end, int) and not isinstance(end, bool) for end in (low, high)) and step in (
        None,
        int(step or 1),
    ):
        return Int(low, high, int(step or 1), log)
    return Float(float(low), float(high), None if step is None else float(step), log)
