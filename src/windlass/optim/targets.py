"""Which weights a projecting optimizer projects (`optim_target_modules`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger

_log = get_logger(__name__)
_FIELD = "optim_target_modules"
_SHOWN = 8


def projected_groups(
    model: nn.Module, groups: Sequence[dict[str, Any]], targets: str | Sequence[str] | None
) -> list[dict[str, Any]]:
    """`groups`, with the weights that `targets` name in groups of their own, which have `projected`. Raises ConfigError
    if `targets` name no weight of a linear layer that is trained.
    """
    chosen = target_weights(model, targets)
    apart = [
        {**group, "params": [p for p in group["params"] if id(p) in chosen], "projected": True}
        for group in groups
    ]
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    found = [group for group in apart if group["params"]]
    count = sum(len(group["params"]) for group in found)
    if not count:
        raise ConfigError(Problem(_FIELD, targets, "none of the weights that it names is trained"))
    others = sum(len(group["params"]) for group in rest)
    _log.info(
        "gradients of %d weights are projected; %d other parameters are updated conventionally", count, others
    )
    return [*rest, *found]


def target_weights(model: nn.Module, targets: str | Sequence[str] | None) -> set[int]:
    """The id of the weight of each linear layer that `targets` name. Raises ConfigError if an item names no linear
    layer, or there is none. `targets`: "all-linear"; or a regular expression that matches whole module names; or a list
    of which each is a part of a module name, a whole one, or such an expression.
    """
    modules = dict(model.named_modules())
    # A head that shares the weight of an embedding is not one: its gradient has rows of single tokens.
    tied = {
        id(p) for m in modules.values() if not isinstance(m, nn.Linear) for p in m.parameters(recurse=False)
    }
    linear = {
        name: m.weight for name, m in modules.items() if isinstance(m, nn.Linear) and id(m.weight) not in tied
    }
    # Transformers takes both spellings.
    if isinstance(targets, str) and targets.replace("_", "-") == "all-linear":
        targets = ".*"
    items = [targets] if isinstance(targets, str) else list(targets or ())
    chosen: set[int] = set()
    for item in items:
        parts = not isinstance(targets, str)
        names = [name for name in linear if _names(item, name, parts)]
        if not names:
            known = ", ".join(list(linear)[:_SHOWN]) or "none"
            fix = f"matches no linear layer of the model; those it has: {known}{' ...' if len(linear) > _SHOWN else ''}"
            raise ConfigError(Problem(_FIELD, item, fix))
        chosen.update(id(linear[name]) for name in names)
    return chosen


def _names(item: str, name: str, parts: bool) -> bool:
    if parts and item in name:
        return True
    try:
        return re.fullmatch(item, name) is not None
    except re.error as error:
        fix = f"is not a regular expression ({error})"
        raise ConfigError(Problem(_FIELD, item, fix)) from None
