"""The arguments of a search, checked before its first trial."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import ismethod
from types import MethodType
from typing import Any

import numpy as np

from windlass.core.errors import Problem, refuse
from windlass.core.optional import is_available
from windlass.search.default_spaces import (
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
)
from windlass.search.optuna_sampler import OptunaSampler
from windlass.search.space import Categorical, Distribution, Float, Int, Trial, checked, declared
from windlass.search.study import Study
from windlass.search.trial_samplers import GridSampler, MedianRule, RandomSampler, Sampler


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
        try:
            distribution = _of_sweep(given)
        except (TypeError, ValueError, OverflowError):  # ends that are not numbers, or beyond all of them
            distribution = None
        if distribution is None:
            known = "value, values, or min and max with uniform, int_uniform, q_uniform or log_uniform_values"
            problems.append(
                Problem(f"hp_space.parameters.{name}", given, f"is not understood; known: {known}")
            )
        else:
            found[name] = checked(name, distribution)
    refuse(problems)
    return found


def _of_sweep(given: Any) -> Distribution | None:
    if not isinstance(given, Mapping) or "probabilities" in given:
        return None
    if "values" in given or "value" in given:
        choices = given.get("values", [given.get("value")])
        return Categorical(tuple(choices)) if isinstance(choices, list | tuple) else None
    if "min" not in given or "max" not in given:
        return None
    low, high = given["min"], given["max"]
    is_whole = isinstance(low, int) and isinstance(high, int)
    match given.get("distribution", "int_uniform" if is_whole else "uniform"):
        case "uniform":
            return Float(float(low), float(high))
        case "int_uniform" if is_whole:
            return Int(low, high)
        case "q_uniform":
            return Float(float(low), float(high), float(given.get("q", 1)))
        case "log_uniform_values":
            return Float(float(low), float(high), log=True)
        case "log_uniform":
            return Float(math.exp(low), math.exp(high), log=True)
    return None


DIRECTIONS = ("minimize", "maximize")
_DEFAULT_SPACES: dict[str, Any] = {
    "optuna": default_hp_space_optuna,
    "random": default_hp_space_optuna,
    "ray": default_hp_space_ray,
    "wandb": default_hp_space_wandb,
}
# Options of each backend: with the others a script would expect what does not happen.
_OPTIONS = {
    "optuna": ("sampler", "pruner", "study_name", "n_jobs"),
    "random": ("seed", "pruner", "n_jobs"),
    "grid": ("pruner", "n_jobs"),
    "ray": ("seed", "n_jobs"),
    "wandb": ("seed", "n_jobs"),
}
_WHY_NOT = {
    "storage": "has no effect: the study is kept in search.json of output_dir, and continued from there",
    "load_if_exists": "has no effect: a study in output_dir is always continued",
    "timeout": "is not built: set n_trials, or stop the search with Ctrl-C and start it again later",
    "scheduler": "is not built: trials run one after the other; use backend='optuna' with a pruner",
    "resources_per_trial": "has no effect: each trial uses all processes of this job",
    "project": "has no effect: no sweep is made at the service; report_to='wandb' sends each trial there",
}


@dataclass(frozen=True)
class SearchSettings:
    """What to search, and how."""

    # Trial -> hyperparameters by name; or the space as data: name -> a list of values or {low, high, step, log}
    hp_space: Any = None
    # Metrics of an evaluation -> a number, or several
    compute_objective: Callable[[dict[str, float]], Any] | None = None
    n_trials: int = 20  # how many trials a study has, those of earlier processes included
    direction: str | list[str] = "minimize"  # "minimize" or "maximize"; a list for several objectives
    # What chooses: "optuna", "random", "grid", "ray" or "wandb"; None: optuna if it is installed
    backend: Any = None
    hp_name: Callable[[Any], str] | None = None  # trial -> the name of its run
    options: dict[str, Any] = field(default_factory=dict)  # of the backend
    seed: int = 42  # of random choices

    def __post_init__(self) -> None:
        refuse(list(self._problems()))

    def _problems(self) -> Iterator[Problem]:
        if not (isinstance(self.n_trials, int) and self.n_trials >= 1):
            yield Problem("n_trials", self.n_trials, "must be a whole number, at least 1")
        for direction in self.directions or [""]:
            if getattr(direction, "value", direction) not in DIRECTIONS:
                yield Problem("direction", direction, "must be 'minimize' or 'maximize', or a list of these")
        if self.name not in _OPTIONS:
            yield Problem("backend", self.name, f"must be one of {', '.join(_OPTIONS)}")
            return
        if self.hp_space is None and self.name not in _DEFAULT_SPACES:
            yield Problem("hp_space", None, f"is needed with backend={self.name!r}: name -> its values")
        by_optuna = self.name == "optuna"
        for option, value in self.options.items():
            if option == "n_jobs" and value != 1:
                yield Problem(
                    option, value, "must be 1: trials run one after the other on all processes of this job"
                )
            elif (
                option == "pruner"
                and value not in (None, "median")
                and (not by_optuna or isinstance(value, str))
            ):
                fix = "must be 'median' or None" + (", or an object of optuna.pruners" if by_optuna else "")
                yield Problem(option, value, fix)
            elif option not in _OPTIONS[self.name]:
                known = ", ".join(_OPTIONS[self.name])
                yield Problem(
                    option, value, _WHY_NOT.get(option, f"is not an option of {self.name}; known: {known}")
                )
        if len(self.directions) > 1 and self.options.get("pruner"):
            yield Problem("pruner", self.options["pruner"], "needs a single objective")

    @property
    def name(self) -> str:
        """The backend."""
        if self.backend is None:
            return "optuna" if is_available("optuna") else "random"
        return str(getattr(self.backend, "value", self.backend))

    @property
    def directions(self) -> list[str]:
        given = self.direction if isinstance(self.direction, list | tuple) else [self.direction]
        return [str(getattr(direction, "value", direction)) for direction in given]

    def chosen_by(self) -> dict[str, Any]:
        """The options of the backend that choose and end trials; of an object its class."""
        given = {name: self.options.get(name) for name in ("sampler", "pruner")}
        return {
            name: value if value is None or isinstance(value, str) else type(value).__name__
            for name, value in given.items()
        }

    def sampler(self, study: Study) -> Sampler:
        """Return what chooses the values of a study's trials. Raises MissingDependencyError without optuna."""
        options = {name: value for name, value in self.options.items() if name != "n_jobs"}
        seed = options.pop("seed", self.seed)
        rule = MedianRule(study) if options.get("pruner") == "median" else None
        if self.name == "optuna":
            return OptunaSampler(self.directions, options, seed)
        return GridSampler(rule) if self.name == "grid" else RandomSampler(seed, rule)

    def values(self, trial: Any) -> dict[str, Any]:
        """Return the hyperparameters of a trial."""
        space = _DEFAULT_SPACES[self.name] if self.hp_space is None else self.hp_space
        given = space if isinstance(space, Mapping) else space(trial)
        if not isinstance(given, Mapping):
            refuse([Problem("hp_space", given, "must return the values of a trial, by name")])
        if self.name == "wandb":
            return _suggested(trial, sweep_space(given))
        if self.name == "ray":
            return ray_values(trial, given)
        return _suggested(trial, declared(space)) if isinstance(space, Mapping) else dict(given)

    def objectives(self, metrics: dict[str, float]) -> list[float]:
        """Return the objectives of an evaluation's metrics.

        Raises:
            ConfigError: they are not numbers, or more or fewer than directions.
        """
        value = (self.compute_objective or default_compute_objective)(dict(metrics))
        try:
            values = [float(one) for one in (value if isinstance(value, list | tuple) else (value,))]
        except (TypeError, ValueError):
            values = []
        if len(values) != len(self.directions):
            count, names = len(self.directions), ", ".join(sorted(metrics))
            fix = f"must return {count} number(s), one for each direction; the metrics are {names}"
            refuse([Problem("compute_objective", value, fix)])
        return values

    def repeatable_objectives(self, metrics: dict[str, float]) -> list[float] | None:
        """The objectives of a trial's metrics, made by a copy of `compute_objective`; None if they depend on calls
        before, or its attributes change in a call: a later process would make others of the same metrics.
        """
        given = self.compute_objective
        # A copied method would still be that of the script's own object.
        owner: Any = copy.copy(given.__self__ if ismethod(given) else given)
        twin = replace(
            self, compute_objective=MethodType(given.__func__, owner) if ismethod(given) else owner
        )
        before = repr(getattr(owner, "__dict__", None))
        first, second = twin.objectives(metrics), twin.objectives(metrics)
        changes = repr(getattr(owner, "__dict__", None)) != before
        return None if changes or repr(first) != repr(second) else first


def _suggested(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    """Suggest a value for each distribution, by the methods that trials of optuna have too."""
    values = {}
    for name, distribution in space.items():
        if isinstance(trial, Trial):
            values[name] = trial.suggest(name, distribution)
        elif hasattr(distribution, "choices"):
            values[name] = trial.suggest_categorical(name, list(distribution.choices))
        else:
            suggest = trial.suggest_int if isinstance(distribution.low, int) else trial.suggest_float
            values[name] = suggest(
                name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
            )
    return values
