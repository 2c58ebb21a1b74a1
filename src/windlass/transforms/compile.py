"""torch.compile in place: the module stays the same object, with its names, hooks and class."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from windlass.core.errors import ConfigError, Problem
from windlass.transforms.strategy import device_of

DEFAULT_BACKEND = "inductor"


def apply_compile(model: nn.Module, backend: str | None = None, mode: str | None = None) -> nn.Module:
    """Compile the calls of `model`, at the first of them.

    Args:
        backend: a name of torch's registry; "inductor" by default.
        mode: one of inductor's modes ("default", "reduce-overhead", "max-autotune", ...); None for its default.

    Raises:
        ConfigError: no such backend or mode, or a mode for another backend than inductor.
    """
    chosen = backend or DEFAULT_BACKEND
    if device_of(model).type == "xla":
        fix = "PyTorch/XLA compiles each update as a whole by itself; leave it out"
        raise ConfigError(Problem("torch_compile", chosen, fix))
    _check(chosen, mode)
    if type(model).__module__.startswith("torch.nn"):
        # Dynamo skips frames of torch's own modules: a bare `Sequential` would silently run uncompiled.
        model._compiled_call_impl = torch.compile(_whole(model._call_impl), backend=chosen, mode=mode)
    else:
        model.compile(backend=chosen, mode=mode)
    return model


def _whole(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` inside a frame that the compiler does not skip."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


def _check(backend: str, mode: str | None) -> None:
    backends = torch._dynamo.list_backends(exclude_tags=())
    if backend not in backends:
        near = difflib.get_close_matches(backend, backends, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        fix = f"{hint}known backends: {', '.join(sorted(backends))}"
        raise ConfigError(Problem("torch_compile_backend", backend, fix))
    if mode is None:
        return
    if backend != DEFAULT_BACKEND:
        fix = f"modes belong to the {DEFAULT_BACKEND} backend, and the backend is {backend!r}; drop one of the two"
        raise ConfigError(Problem("torch_compile_mode", mode, fix))
    modes = list(torch._inductor.list_mode_options())
    if mode not in modes:
        raise ConfigError(Problem("torch_compile_mode", mode, f"known modes: {', '.join(modes)}"))
