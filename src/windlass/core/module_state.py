"""What of a module is saved: its state dict, and whether the module saves and loads it in a way of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.tensors import distinct
from windlass.core.trees import find_device, send_to_device

_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Overrides in these packages leave every tensor of a state dict in the memory of its parameter or buffer.
_KNOWN = ("torch.nn.", "torch.distributed.")
EXTRA_STATE = "_extra_state"
_LONGEST = "max_seq_len_cached"  # the end of the name of an attribute
_ELSEWHERE = "_state_elsewhere"  # an attribute of modules


class ElsewhereState:
    """The values of parameters that an engine keeps outside the module, which computes with copies of them.

    Attributes:
        values: parameter -> the tensor that is saved and loaded in its place.
        in_stages: each of them is whole on one rank, and other ranks have nothing of it.
    """

    in_stages = False

    @property
    def values(self) -> Mapping[Tensor, Tensor]:
        raise NotImplementedError

    def loaded(self) -> None:
        """Called after `values` were loaded in place: update the parameters, if they are others. Collective."""

    def let_go(self) -> None:
        """Called before another engine takes the module, to undo what can be undone. Collective."""


def keep_elsewhere(module: nn.Module, state: ElsewhereState | None) -> None:
    """Declare that an engine keeps the values of parameters of `module`; None: it has them itself again."""
    setattr(bare(module), _ELSEWHERE, state)


def let_go(module: nn.Module) -> None:
    """Let the engine that keeps values of `module`, if any, remove what it put there. Collective."""
    elsewhere = kept_elsewhere(module)
    if elsewhere is not None:
        elsewhere.let_go()
        keep_elsewhere(module, None)


def kept_elsewhere(module: nn.Module) -> ElsewhereState | None:
    return getattr(bare(module), _ELSEWHERE, None)


def state_was_loaded(module: nn.Module) -> None:
    """Called after tensors of `state_of` were filled in place. Collective if an engine keeps them."""
    elsewhere = kept_elsewhere(module)
    if elsewhere is not None:
        elsewhere.loaded()


def bare(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped; any other module as it is."""
    inner = module
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = inner._orig_mod  # type: ignore[assignment]
    return inner


def without_adapters(module: nn.Module) -> nn.Module:
    """The model that adapters of peft were added to, whose layers have the names of its own; any other as it is."""
    base: Any = getattr(module, "get_base_model", None)
    return base() if callable(base) else module


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict, not detached; of a peft model always with the base.

    Scripts assign peft's models a `state_dict` that returns the adapter alone, under the names of its file, from a time
    when trainers saved every model whole.
    """
    if _returns_its_adapter(module):
        return dict(type(module).state_dict(module, keep_vars=True))
    return dict(module.state_dict(keep_vars=True))


def _returns_its_adapter(module: nn.Module) -> bool:
    return (
        "state_dict" in vars(module) and hasattr(module, "peft_config") and hasattr(module, "get_base_model")
    )


def customizes_state(module: nn.Module) -> bool:
    """Return True if the module or one inside overrides how its state dict is made or loaded, by a method or a hook.

    Its state dict may then hold copies, other names or other shapes, which only its own `load_state_dict` puts back.
    """
    return any(_customizes(member) for member in module.modules())


def _customizes(module: nn.Module) -> bool:
    methods = [getattr(type(module), name) for name in _METHODS]
    methods += [vars(module)[name] for name in _METHODS if name in vars(module)]
    if _returns_its_adapter(module):
        methods.remove(vars(module)["state_dict"])
    hooks = [hook for table in _HOOKS for hook in (getattr(module, table, None) or {}).values()]
    return not all(_module_of(item).startswith(_KNOWN) for item in (*methods, *hooks))


def _module_of(function: Any) -> str:
    function = getattr(function, "hook", function)  # how a module keeps its load hooks
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's state dict: its own parameters and buffers by name, not detached, unless it customizes its state or
    an engine keeps them elsewhere.

    What `get_extra_state` returned is in it as it is.
    """
    if customizes_state(module):
        return dict(bare(module).state_dict())  # an override may take no arguments
    return values_of(module)


def values_of(module: nn.Module) -> dict[str, Any]:
    """The module's own state dict, not detached, with what an engine keeps in place of parameters."""
    state, elsewhere = full_state_dict(module), kept_elsewhere(module)
    if elsewhere is None:
        return state
    values = elsewhere.values  # once: they may be mapped from files
    return {
        name: values.get(value, value) if isinstance(value, nn.Parameter) else value
        for name, value in state.items()
    }


def with_copied_buffers(module: nn.Module) -> dict[str, Any]:
    """As `state_of`, with copies of all buffers; of a module that customizes its state, of all tensors."""
    own = customizes_state(module)
    buffers = {id(buffer) for buffer in module.buffers()}
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (own or id(value) in buffers):
            return value
        return copies.setdefault(id(value), value.detach().clone())

    return {name: copied(value) for name, value in state_of(module).items()}


def modules_with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that define `get_extra_state`, by the name of that state in the state dict."""
    return {
        f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: member
        for name, member in module.named_modules(remove_duplicate=False)
        if type(member).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What `get_extra_state` returns, by the name of that state in the state dict."""
    return {name: member.get_extra_state() for name, member in modules_with_extra_state(module).items()}


def longest_rows(module: nn.Module) -> dict[str, Any]:
    """The longest row that rotations of transformers with "dynamic" frequencies have met, by the name of the attribute.

    They keep the frequencies of that row, a buffer, until a row comes that needs none of them.
    """
    return {
        f"{prefix}.{name}": value
        for prefix, member in module.named_modules()
        if "dynamic" in str(vars(member).get("rope_type"))
        for name, value in vars(member).items()
        if name.endswith(_LONGEST)
    }


def on_device_of(live: Any, value: Any) -> Any:
    """A value as it was stored, its tensors on the device of those in the present one."""
    device = find_device(live)
    return value if device is None else send_to_device(value, device)


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not in the state dict: those registered as not persistent; all of a module that customizes its
    state.
    """
    every = customizes_state(module)
    found: dict[str, Tensor] = {}
    for prefix, member in module.named_modules():
        for name, buffer in member._buffers.items():
            if buffer is not None and (every or name in member._non_persistent_buffers_set):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def set_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Put buffers, extra states and longest rows back by name; what the module does not have is left out."""
    members = modules_with_extra_state(module)
    owners = dict(module.named_modules())
    with torch.no_grad():
        for name, value in state.items():
            owner, _, last = name.rpartition(".")
            if name in members:
                members[name].set_extra_state(on_device_of(members[name].get_extra_state(), value))
            elif owner in owners and last in owners[owner]._buffers:
                _load_buffer(owners[owner], last, value)
            elif owner in owners and last.endswith(_LONGEST):
                setattr(owners[owner], last, value)


def _load_buffer(owner: nn.Module, name: str, value: Tensor) -> None:
    live = owner._buffers[name]
    if live is not None and live.shape == value.shape and live.dtype == value.dtype:
        distinct(live).copy_(distinct(value, live))
    else:
        owner._buffers[name] = value.clone() if live is None else value.to(live.device, copy=True)
