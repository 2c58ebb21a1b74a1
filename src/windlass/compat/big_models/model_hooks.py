"""Hooks that run before and after a module's forward, and may change its inputs and outputs.

Unlike PyTorch's hooks they replace the module's `forward`: `module._hf_hook` is the hook, and `module._old_forward` the
original forward. Other libraries look for these two names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch._compile import _disable_dynamo

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_Function = TypeVar("_Function", bound=Callable[..., Any])

GUARDED = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron")
"""Methods that move a module, and that `dispatch_model` replaces on a dispatched one."""


def without_compiler(function: _Function) -> _Function:
    """Exclude `function` from compiled graphs, because it moves weights. Does not import the compiler."""
    return cast(_Function, _disable_dynamo(function, recursive=True))


class ModelHook:
    """Callbacks around the forward of a module. The base class does nothing.

    Class attribute `no_grad`: the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached to `module`. Return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Called before the forward of `module`. Return its arguments: a tuple, and a dict of those with names."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward of `module`. Return the `output` for the caller."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called instead of `post_forward` if the forward of `module`, or `pre_forward`, raised. Free what was
        allocated for it.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed from `module`. Return the module."""
        return module


class SequentialHook(ModelHook):
    """Calls several hooks in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @without_compiler
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach `hook` to `module` in place, and return the module.

    Args:
        append: keep the existing hook and call it first; otherwise it is replaced.
    """
    # Of this module itself: `__getattr__` of a wrapper, as of peft, would find that of the module inside it.
    old_hook: Any = vars(module).get("_hf_hook")
    if append and old_hook is not None:
        # Detached first, so that its weights are where they were: `init_hook` of both runs again on the module.
        remove_hook_from_module(module)
        hook = SequentialHook(old_hook, hook)
    old_forward = vars(module).get("_old_forward", module.forward)
    module._old_forward = old_forward
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    # With the signature of the forward, from which libraries read what it takes.
    _set_forward(module, functools.update_wrapper(functools.partial(_hooked_forward, module), old_forward))
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)  # a script that retries with a smaller batch needs the memory
        raise
    return hook.post_forward(module, output)


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    # A traced module compiles its graph into its own class. An attribute of the instance would hide later changes of
    # the graph.
    owner: Any = type(module) if isinstance(module, fx.GraphModule) else module
    owner.forward = forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook from a module (with `recurse`, from its submodules too), and return the module."""
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
    if module.forward != old_forward:  # it was an attribute of the instance before the first hook
        module.forward = old_forward


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from a module and its submodules."""
    remove_hook_from_module(module, recurse=True)
