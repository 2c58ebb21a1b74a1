"""Parser of the free-form options of an optimizer (`optim_args`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args, get_origin

import torch

from windlass.config.kinds import flag
from windlass.config.plan import OptimizerPlan
from windlass.core.errors import Problem, did_you_mean, refuse
from windlass.optim.option_ranges import outside_range

# The class of an optimizer, and its keyword arguments without the parameters.
Recipe = tuple[type[torch.optim.Optimizer], dict[str, Any]]

_WORDS: dict[type, str] = {
    torch.dtype: "a floating-point dtype, such as float32 or bfloat16",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
# Arguments of constructors that the plan sets, or a schedule.
_OF_PLAN = frozenset({"lr", "betas", "eps", "weight_decay", "warmup_steps", "in_backward"})
# Options that have an argument of their own; setting both would leave one without effect.
_ELSEWHERE = {
    "weight_decay": "set the weight_decay argument instead: it reaches the groups that decay",
    "lr": "set the learning_rate argument instead",
    "betas": "set the adam_beta1 and adam_beta2 arguments instead",
}


def read_options(optimizer: str, options: Mapping[str, Any], known: Mapping[str, type]) -> dict[str, Any]:
    """`options` as values of the types in `known` (float, int, bool, str, torch.dtype); strings are parsed. Raises
    ConfigError for options that `optimizer` does not have, and values that do not parse; all are named.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in options.items():
        field = f"optim_args.{name}"
        if name not in known:
            takes = f"{optimizer} takes {', '.join(known) or 'no options'}{did_you_mean(name, known)}"
            problems.append(Problem(field, value, _ELSEWHERE.get(name, takes)))
            continue
        try:
            values[name] = _parse(value, known[name])
        except (TypeError, ValueError):
            problems.append(Problem(field, value, f"must be {_WORDS[known[name]]}"))
            continue
        if fix := outside_range(name, values[name]):
            problems.append(Problem(field, value, fix))
    refuse(problems)
    return values


def recipe_of(cls: type[torch.optim.Optimizer], *names: str) -> Callable[[OptimizerPlan], Recipe]:
    """A function that makes `cls` from a plan: with its learning rate, betas and epsilon, and the options of
    `optim_args`. These are the constructor's arguments `names`, by default all that are one value and have no argument
    of the configuration.
    """

    def recipe(plan: OptimizerPlan) -> Recipe:
        kinds = _kinds_of(cls)
        kwargs: dict[str, Any] = {"lr": plan.learning_rate}
        if "betas" in kinds:
            kwargs["betas"] = plan.betas
        # Adafactor and its kin have two, and keep their own; so do those whose one is an option of theirs.
        if "eps" in kinds and get_origin(kinds["eps"]) is not tuple and "eps" not in names:
            kwargs["eps"] = plan.epsilon
        if plan.name.endswith("_layerwise"):
            kwargs["in_backward"] = True
        fitting = names or [name for name, kind in kinds.items() if kind in _WORDS and name not in _OF_PLAN]
        return cls, kwargs | read_options(plan.name, plan.options, {name: kinds[name] for name in fitting})

    return recipe


def _kinds_of(cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments of a constructor, and their types; of one that may be None, the other type."""
    kinds = {}
    for name, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        others = [kind for kind in get_args(parameter.annotation) if kind is not NoneType]
        kinds[name] = others[0] if len(others) == 1 else parameter.annotation
    return kinds


def arguments(found: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an optimizer's constructor that its groups keep as options, from its `locals()`."""
    return {name: value for name, value in found.items() if name not in ("self", "params", "__class__")}


def _parse(value: Any, kind: type) -> Any:
    if kind is torch.dtype:
        found = (
            value
            if isinstance(value, torch.dtype)
            else getattr(torch, str(value).removeprefix("torch."), None)
        )
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(value)
        return found
    # Values of `optim_args` are text, and `bool("False")` is True.
    parsed = flag(value) if kind is bool else kind(value)
    if parsed != parsed:  # "nan" is a float, and few constructors refuse it
        raise ValueError(value)
    return parsed
