"""The forward of a prepared model: mixed precision, a check that the wrapper is called, and unwrapping."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.core.trees import convert_to_fp32
from windlass.transforms.ddp import Replicated


class MixedForward:
    """The forward of one module under `autocast`, with floating-point outputs in single precision.

    It is an attribute of the module, and does not keep it: a module that its attribute kept would stay in memory until
    Python looks for cycles. A copy of the module gets one of its own.
    """

    def __init__(self, module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        original = module.forward
        self._module, self._autocast = weakref.ref(module), autocast
        # A function on the instance belongs to that instance only; a method is that of the class.
        own = getattr(original, "__func__", None) is type(module).forward
        self.replaced: Callable[..., Any] | None = None if own else original
        functools.update_wrapper(self, type(module).forward if own else original)
        # Scripts and libraries read from it which columns the model takes.
        self.__signature__ = inspect.signature(original)
        # `torch.export` reads from it where the forward was written.
        self.__code__ = getattr(original, "__code__", type(self).__call__.__code__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            if self.replaced is not None:
                return convert_to_fp32(self.replaced(*args, **kwargs))
            module = self._owner
            return convert_to_fp32(type(module).forward(module, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedForward:
        copied = MixedForward.__new__(MixedForward)
        copied.__dict__.update(self.__dict__, _module=weakref.ref(copy.deepcopy(self._owner, memo)))
        return copied

    def __reduce__(self) -> Any:
        return getattr, (self._owner, "forward")  # in another process, that of its class

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None, "its forward is an attribute of it"
        return module


def mix_precision(module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run the module's forward under `autocast`, and convert its floating-point outputs to single precision.

    The forward is replaced on the instance, so its class, parameter names and hooks do not change.
    """
    module.forward = MixedForward(module, autocast)


def restore_forward(module: nn.Module) -> None:
    """Undo `mix_precision`."""
    mixed = vars(module).get("forward")
    if isinstance(mixed, MixedForward):
        del module.forward  # that of the class again
        if mixed.replaced is not None:
            module.forward = mixed.replaced


class RawForwardCheck:
    """A hook that refuses training forwards of `module` outside `wrapper`, which reduces gradients."""

    def __init__(self, module: nn.Module, wrapper: Replicated) -> None:
        self._guarded, self._wrapper, self._seen = weakref.ref(module), wrapper, wrapper.forwards

    def __call__(self, bare: nn.Module, args: tuple[Any, ...]) -> None:
        if bare is not self._guarded():  # a copy of the module, which is not prepared
            return
        # With as many forwards of the wrapper as before, this one did not come through it.
        if self._wrapper.forwards == self._seen and bare.training and torch.is_grad_enabled():
            name = type(bare).__name__
            raise ModelError(
                f"the {name} that was given to `accelerator.prepare` was called directly: its gradients would not be "
                "reduced over the processes. Call the model that `prepare` returned"
            )
        self._seen = self._wrapper.forwards

    def __reduce__(self) -> Any:
        # A file of the whole module is read without Windlass too. As a hook this returns the arguments unchanged.
        return getattr, ({}, "get")


def refuse_raw_forward(module: nn.Module, wrapper: Replicated) -> Callable[[], None]:
    """Refuse training forwards of `module` outside `wrapper`. Return the undo function."""
    return module.register_forward_pre_hook(RawForwardCheck(module, wrapper)).remove


def is_compiled_module(module: nn.Module) -> bool:
    """Return True if `module` is a wrapper made by `torch.compile`."""
    # Importing the compiler takes seconds; if it is not imported, nothing is compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Remove the wrappers of data parallelism. They remain usable.

    Args:
        keep_fp32_wrapper: False removes mixed precision from its forward.
        keep_torch_compile: False removes the wrapper of the compiler too.
        recursive: unwrap submodules too.
    """
    compiled: Any = model if is_compiled_module(model) else None
    module: Any = model if compiled is None else compiled._orig_mod
    while isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        module = module.module
    if recursive:
        for name, child in module.named_children():
            setattr(module, name, extract_model_from_parallel(child, recursive=True))
    if not keep_fp32_wrapper:
        # Either the module was prepared, or the wrapper of the compiler, which forwards attribute access.
        restore_forward(module if compiled is None or "forward" in vars(module) else compiled)
    if compiled is None or not keep_torch_compile:
        return module  # type: ignore[no-any-return]
    # A new wrapper, because the given one contains the replicas that reduce gradients.
    same = module is compiled._orig_mod
    return compiled if same else type(compiled)(module, compiled.dynamo_ctx)  # type: ignore[no-any-return]
