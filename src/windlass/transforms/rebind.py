"""Pointing an optimizer to the parameters that sharding created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.trees import map_leaves
from windlass.dist.sharded import check_takes_parts, is_sharded, shard_like


def names_of(module: nn.Module) -> dict[int, str]:
    """id of each parameter -> the first of its names; call it before the module is sharded."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def rebind(
    optimizer: torch.optim.Optimizer, before: Mapping[int, str], module: nn.Module, keeps_others: bool = False
) -> None:
    """Replace the parameters of `optimizer` by those that `module` has now.

    The optimizer and its groups stay the same objects, so schedules and scripts that refer to them stay valid. Existing
    state is kept; tensors of the shape of their parameter are sharded like it. Calling it again changes nothing.

    Args:
        before: the result of `names_of` before sharding.
        keeps_others: the optimizer may update tensors that the module did not have; they stay.

    Raises:
        ModelError: the optimizer updates another parameter that the module did not have.
        ConfigError: the optimizer cannot update sharded parameters.
    """
    now = dict(module.named_parameters())
    known = {id(parameter) for parameter in now.values()}
    replaced: dict[Tensor, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known and not (keeps_others and id(parameter) not in before):
                replaced[parameter] = _successor(parameter, before, now, f"{position} of group {index}")
    for group in optimizer.param_groups:
        # In place: other references to the list see the new parameters.
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            optimizer.state[new] = _carried(optimizer.state.pop(old), old, new)
    check_takes_parts(optimizer, "optimizer", type(optimizer).__name__)


def update_singly(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's optimizers, and subclasses of them, update one tensor at a time in groups with both sharded
    parameters and whole ones, or with ones that are sharded over different ranks.

    Of these in one list `DTensor` makes an error. Scalars are no problem, and Windlass's optimizers take the parts of
    this rank.
    """
    kinds = [kind.__module__ for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    if kinds[0].startswith("windlass.") or not any(kind.startswith("torch.optim.") for kind in kinds):
        return
    for group in optimizer.param_groups:
        tensors = [parameter for parameter in group["params"] if parameter.dim()]
        if len({tensor.device_mesh if is_sharded(tensor) else None for tensor in tensors}) > 1:
            group.update(dict.fromkeys(group.keys() & {"foreach", "fused"}, False))


def _successor(parameter: Tensor, before: Mapping[int, str], now: Mapping[str, Tensor], where: str) -> Tensor:
    name = before.get(id(parameter))
    if name is None or name not in now:
        raise ModelError(
            f"the optimizer's parameter {where} (shape {list(parameter.shape)}) is not one of the model's parameters, "
            "so it cannot follow when the model is sharded; build the optimizer from this model's parameters"
        )
    return now[name]


def _carried(state: Any, old: Tensor, new: Tensor) -> Any:
    """The state of `old` for `new`."""

    def moved(value: Tensor) -> Tensor:
        # A scalar, such as a number of steps, belongs to no element.
        fits = is_sharded(new) and not is_sharded(value) and value.shape == old.shape and value.dim() > 0
        return shard_like(value, new) if fits else value

    return map_leaves(moved, state)
