"""Hooks around a module's forward that see, and may change, its inputs and outputs.

Unlike PyTorch's own hooks they live in the module's `forward` itself: `module._hf_hook` is the hook and
`module._old_forward` the forward behind it. Libraries look for these two names, so they are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch._compile import _disable_dynamo

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_Function = TypeVar("_Function", bound=Callable[..., Any])

GUARDED = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron")
"""Methods that move a module, and that `dispatch_model` replaces on a dispatched one."""


def without_compiler(function: _Function) -> _Function:
    """Keep `function` out of compiled graphs: it moves weights. (Costs no import of the compiler.)"""
    return cast(_Function, _disable_dynamo(function, recursive=True))


class ModelHook:
    """What is done just before and after the forward of a module. The base does nothing.

    Class attribute `no_grad`: the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; gives the module back."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Called before the forward; gives the arguments that it is to see."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; gives the output that the caller is to see."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called instead of `post_forward` when the forward raised: let go of what was brought for it."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; gives the module back."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, each called in its turn."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach each."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Each sees the arguments that the one before gave."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each sees the output that the one before gave."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Each lets go."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put `hook` around the forward of `module`, in place; gives the module back.

    Args:
        append: keep a hook that is there and call it first. Otherwise it is replaced.
    """
    old_hook: Any = vars(module).get("_hf_hook")
    if append and old_hook is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(old_hook, hook)
    old_forward = vars(module).get("_old_forward", module.forward)
    module._old_forward = old_forward
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    _set_forward(module, functools.update_wrapper(functools.partial(_hooked_forward, module), old_forward))
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)  # a script that tries again with a smaller batch needs the memory
        raise
    return hook.post_forward(module, output)


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    # A traced module compiles its graph into the class, which is its own; an attribute of the instance would hide
    # every later change of the graph.
    owner: Any = type(module) if isinstance(module, fx.GraphModule) else module
    owner.forward = forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module (and off all in it, with `recurse`); gives the module back."""
    hook = vars(module).pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
    old_forward = vars(module).pop("_old_forward", None)
    if old_forward is not None:
        _restore_forward(module, old_forward)
    for name in GUARDED:
        vars(module).pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def _restore_forward(module: nn.Module, old_forward: Callable[..., Any]) -> None:
    if isinstance(module, fx.GraphModule):
        _set_forward(module, old_forward)
        return
    vars(module).pop("forward", None)
    if module.forward != old_forward:  # it was an attribute of the instance before any hook came
        module.forward = old_forward


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and off all in it."""
    remove_hook_from_module(module, recurse=True)


def force_accelerate_hooks(child_module_names: str | Sequence[str]) -> Callable[[_Function], _Function]:
    """Decorator of a `forward` that uses the weights of its children without calling them.

    The hooks of these children are called around it, so that offloaded weights are there.
    """
    names = [child_module_names] if isinstance(child_module_names, str) else list(child_module_names)

    def decorate(forward: _Function) -> _Function:
        @functools.wraps(forward)
        def hooked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            children = [child for child in map(self.get_submodule, names) if hasattr(child, "_hf_hook")]
            for child in children:
                child._hf_hook.pre_forward(child)  # type: ignore[operator,union-attr]
            output = forward(self, *args, **kwargs)
            for child in reversed(children):
                child._hf_hook.post_forward(child, ())  # type: ignore[operator,union-attr]
            return output

        return hooked  # type: ignore[return-value]

    return decorate
