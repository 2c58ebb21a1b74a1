"""Loading a model that customizes its state dict through its own `load_state_dict`, and comparing the result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.codec import naming, same_value
from windlass.checkpoint.names import shorten
from windlass.core.errors import CheckpointError
from windlass.core.module_state import modules_with_extra_state
from windlass.core.tensors import same_bits
from windlass.dist.sharded import from_part, local


def read_like(mine: Tensor, live: Tensor) -> Tensor:
    """This rank's part of a stored tensor in the dtype of `live`, on its device, and spread over ranks as it is."""
    like = local(live)
    return from_part(mine.to(device=like.device, dtype=like.dtype), live)


def fill_values(path: Path, module: nn.Module, values: Mapping[str, Any]) -> None:
    """Pass values, by name in the state dict, to `set_extra_state` of their modules, or copy them into tensors."""
    members = modules_with_extra_state(module)
    own = {name: value for name, value in values.items() if name not in members}
    state: dict[str, Any] = module.state_dict(keep_vars=True) if own else {}
    with torch.no_grad():
        for name, value in own.items():
            if value.shape != state[name].shape:
                shapes = f"{list(value.shape)} in the file and {list(state[name].shape)} in the model"
                raise CheckpointError(f"{path}: {name} is {shapes}")
            state[name].copy_(value)
    for name, member in members.items():
        with naming(f"{path} cannot be loaded: set_extra_state of {type(member).__name__} ({name}) failed"):
            member.set_extra_state(values[name])
            after = member.get_extra_state()
        if not same_value(after, values[name]):
            raise CheckpointError(
                f"{path} was loaded, but {name} has another value than was loaded: make set_extra_state of "
                f"{type(member).__name__} the inverse of get_extra_state"
            )


def hand_over(path: Path, module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load `values`, by the names of the state dict, with `load_state_dict`, and compare the state dict afterwards.
    Raises CheckpointError if the model refuses them, or its state dict is not equal to the bit afterwards. `path`:
    names the source in errors.
    """
    with (
        naming(f"{path} cannot be loaded: load_state_dict of {type(module).__name__} failed"),
        torch.no_grad(),
    ):
        module.load_state_dict(_copy(module.state_dict(), values))
    differing = different_entries(values, module.state_dict())
    if differing:
        raise CheckpointError(
            f"{path} was loaded, but {len(differing)} entries of {type(module).__name__}.state_dict() have other "
            f"values than were loaded: {shorten(differing)}. Make load_state_dict the inverse of state_dict"
        )


def _copy(template: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The values in the order of the model's own state dict, with the versions of modules that it has."""
    state: OrderedDict[str, Any] = OrderedDict((name, values[name]) for name in template)
    # Without a version modules of torch take the state for an old one, and change it (`BatchNorm` adds its
    # counter).
    if hasattr(template, "_metadata"):
        state._metadata = template._metadata  # type: ignore[attr-defined]
    return state


def different_entries(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose entries differ in a bit, or which only one of two state dicts has."""
    return [
        name
        for name in {**one, **other}
        if not (name in one and name in other and _same(one[name], other[name]))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(local(one), local(other))
    return same_value(one, other)
