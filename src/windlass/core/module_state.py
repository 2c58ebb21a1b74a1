"""What of a module is saved: its state dict, and whether the module saves and loads it in a way of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

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


def bare(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped; any other module as it is."""
    inner = module
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = inner._orig_mod  # type: ignore[assignment]
    return inner


def customizes_state(module: nn.Module) -> bool:
    """Return True if the module or one inside overrides how its state dict is made or loaded, by a method or a hook.

    Its state dict may then hold copies, other names or other shapes, which only its own `load_state_dict` puts back.
    """
    return any(_customizes(member) for member in module.modules())


def _customizes(module: nn.Module) -> bool:
    methods = [getattr(type(module), name) for name in _METHODS]
    methods += [module.__dict__[name] for name in _METHODS if name in module.__dict__]
    hooks = [hook for table in _HOOKS for hook in (getattr(module, table, None) or {}).values()]
    return not all(_module_of(item).startswith(_KNOWN) for item in (*methods, *hooks))


def _module_of(function: Any) -> str:
    function = getattr(function, "hook", function)  # how a module keeps its load hooks
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's state dict: its own parameters and buffers by name, not detached, unless it customizes its state.

    What `get_extra_state` returned is in it as it is.
    """
    if customizes_state(module):
        return dict(bare(module).state_dict())  # an override may take no arguments
    return dict(module.state_dict(keep_vars=True))


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


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Give states by name to the modules that have them; others are left as they are."""
    for name, member in modules_with_extra_state(module).items():
        if name in states:
            member.set_extra_state(states[name])
