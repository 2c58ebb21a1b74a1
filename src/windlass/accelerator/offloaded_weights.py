"""Read the weights of a model that keeps some of them in host memory or in files between forwards.

Such a module has a hook `module._hf_hook` with `offload` and `weights_map` (name -> tensor). These are the names that
`windlass.hooks`, accelerate and transformers use; nothing else is assumed about the hook.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from windlass.core.errors import ModelError


def offload_hook(module: nn.Module) -> Any:
    """The hook that offloads the weights of `module` itself, or None."""
    waiting = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop(0)
        if getattr(hook, "offload", False) is True:
            return hook
        waiting = [*getattr(hook, "hooks", ()), *waiting]
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if the weights of `module` itself are offloaded between forwards."""
    return offload_hook(module) is not None


def load_offloaded_parameter(model: nn.Module, param_name: str) -> Tensor:
    """The data of one offloaded parameter or buffer, from the weights map of a hook on a module that contains it."""
    parts = param_name.split(".")
    # From the innermost module outwards: the nearest hook has moved the weight.
    for depth in reversed(range(len(parts))):
        hook = offload_hook(model.get_submodule(".".join(parts[:depth])))
        name = ".".join(parts[depth:])
        if hook is not None and hook.weights_map is not None and name in hook.weights_map:
            data: Tensor = hook.weights_map[name]
            return data
    raise ModelError(f"{param_name} is not among the offloaded weights of this model")


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The whole state dict of a dispatched model, on the host; tied weights are one tensor."""
    found: dict[int, Any] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) not in found:
            data = load_offloaded_parameter(model, name) if getattr(value, "is_meta", False) else value
            found[id(value)] = data.detach().to("cpu") if isinstance(data, Tensor) else data
    return {name: found[id(value)] for name, value in state.items()}
