"""Parser of the free-form options of an optimizer (`optim_args`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from windlass.config.kinds import flag
from windlass.config.plan import OptimizerPlan
from windlass.core.errors import Problem, did_you_mean, refuse

# The class of an optimizer, and its keyword arguments without the parameters.
Recipe = tuple[type[torch.optim.Optimizer], dict[str, Any]]

_WORDS: dict[type, str] = {
    torch.dtype: "a floating-point dtype, such as float32 or bfloat16",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
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
    refuse(problems)
    return values


def recipe_of(
    cls: type[torch.optim.Optimizer], *values: str, **known: type
) -> Callable[[OptimizerPlan], Recipe]:
    """A function that makes `cls` from a plan: with its learning rate, those of its `values` ("betas", "eps"), and the
    options of `optim_args` that `known` has, by name and type.
    """

    def recipe(plan: OptimizerPlan) -> Recipe:
        of_plan = {"betas": plan.betas, "eps": plan.epsilon}
        options = read_options(plan.name, plan.options, known)
        return cls, {"lr": plan.learning_rate, **{name: of_plan[name] for name in values}, **options}

    return recipe


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
    return flag(value) if kind is bool else kind(value)
