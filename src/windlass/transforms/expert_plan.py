"""Which layers of a model are experts of a mixture: those of its attribute `ep_plan`.

Models of transformers have one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from windlass.core.errors import ConfigError, Problem

# A layer of experts, in transformers before 5.18 by the second name, and a parameter whose first dimension counts them.
_LAYERS, _PARAMETER = ("ep_dispatch_experts", "moe_tp_experts"), "grouped_gemm"


def chosen_experts(
    module: nn.Module, ranks: int, tensor_ranks: int = 1
) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """The layers of experts that `ranks` divide, and the tensor gang of each of these once more, with the names of
    their parameters, by path.

    They are those of the attribute `ep_plan`, which models of transformers have: the path of a layer, in which * is a
    number or a name -> "ep_dispatch_experts", and of each of its parameters -> "grouped_gemm".
    """
    name = type(module).__name__
    owner, plan = _planned(module)
    if not plan:
        fix = "has no plan for dividing experts (ep_plan): set ep_size=1"
        raise ConfigError(Problem("model", name, fix))
    found: dict[str, tuple[nn.Module, tuple[str, ...]]] = {}
    parameters = {path for path, _ in owner.named_parameters() if style_in(plan, path) == _PARAMETER}
    for path, layer in owner.named_modules():
        if style_in(plan, path) not in _LAYERS:
            continue
        names = tuple(
            each for each, _ in layer.named_parameters(recurse=False) if f"{path}.{each}" in parameters
        )
        if not names:
            fix = (
                "has no parameters of its plan there: adapters on experts are not built together with ep_size; leave "
                "the experts out of target_modules and target_parameters, or set ep_size=1"
            )
            raise ConfigError(Problem(f"model.{path}", type(layer).__name__, fix))
        check_experts(path, layer, names, {"ep_size": ranks, "tp_size": tensor_ranks})
        found[path] = layer, names
    if not found:
        raise ConfigError(
            Problem("model", name, "none of its layers has a name of its ep_plan; set ep_size=1")
        )
    return found


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of experts of a model with a plan for them (`chosen_experts`), with their adapters."""
    owner, plan = _planned(module)
    return [layer for path, layer in owner.named_modules() if style_in(plan, path) in _LAYERS]


def number_of_experts(layer: nn.Module) -> int:
    """How many experts a layer has, over all ranks that divide them."""
    base: Any = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer  # type: ignore[operator]
    return int(base.num_experts)


def _planned(module: nn.Module) -> tuple[nn.Module, Mapping[str, str]]:
    """The outermost module that has a plan itself, since wrappers pass on the attributes of what they wrap, and its
    plan; `module` and an empty one if there is none.
    """
    for part in module.modules():
        own = vars(part)  # before 5.18, models of transformers have only the second name
        plan: Any = own.get("ep_plan", own.get("_ep_plan"))
        if plan and isinstance(plan, Mapping):
            return part, plan
    return module, {}


def style_in(plan: Mapping[str, str], path: str) -> str | None:
    """The style that a plan of patterns has for a layer or parameter; None if no pattern fits."""
    # An asterisk is one part of a path, so that a pattern of a layer does not name what is in it.
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path):
            return style
    return None


def check_experts(path: str, layer: nn.Module, names: Iterable[str], sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if ranks cannot divide the experts of a layer.

    Args:
        names: of its parameters.
        sizes: the number of ranks along each axis, by the field that has it. The first is blamed.
    """
    (field, ranks), *others = sizes.items()
    experts = getattr(layer, "num_experts", None)
    if not isinstance(experts, int) or any(len(layer.get_parameter(name)) != experts for name in names):
        fix = f"has no num_experts that is the first size of its parameters; set {field}=1"
        raise ConfigError(Problem(f"model.{path}", type(layer).__name__, fix))
    if experts % math.prod(sizes.values()):
        times = "".join(f"times {other}={size} " for other, size in others if size > 1)
        fix = f"{times}must divide the experts of {path}, which are {experts}"
        raise ConfigError(Problem(field, ranks, fix))
