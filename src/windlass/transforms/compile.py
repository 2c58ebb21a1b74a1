"""torch.compile in place: the module stays the same object, with its names, hooks and class."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.config.plan import CompilePlan
from windlass.core.errors import ConfigError, Problem, did_you_mean
from windlass.transforms.blocks import repeated_blocks
from windlass.transforms.strategy import device_of

_INDUCTOR = "inductor"


def apply_compile(model: nn.Module, plan: CompilePlan) -> nn.Module:
    """Compile the calls of `model`, or of its repeated blocks, at the first of them. Raises ConfigError for no such
    backend or mode, a mode for another backend than inductor, or no repeated blocks.
    """
    if device_of(model).type == "xla":
        fix = "PyTorch/XLA compiles each update as a whole by itself; leave it out"
        raise ConfigError(Problem("torch_compile", plan.backend, fix))
    _check(plan)
    blocks = list(repeated_blocks(model)) if plan.blocks else [model]
    if not blocks:
        fix = (
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential holds several modules of one "
            "class with layers inside; leave it out to compile the whole model"
        )
        raise ConfigError(Problem("torch_compile_blocks", True, fix))
    for block in blocks:
        _compile(block, plan)
    return model


def _compile(module: nn.Module, plan: CompilePlan) -> None:
    # Dynamo skips frames of torch's own modules: a bare `Sequential` would silently run uncompiled.
    is_torchs = type(module).__module__.startswith("torch.nn")
    compiled = torch.compile(
        _whole(module._call_impl) if is_torchs else module._call_impl,
        backend=plan.backend,
        mode=plan.mode,
        fullgraph=plan.fullgraph,
        dynamic=plan.dynamic or None,  # False would compile for each size, until torch gives up
        options=plan.options or None,
    )
    module._compiled_call_impl = (
        compiled if plan.memory_budget is None else _budgeted(compiled, plan.memory_budget)
    )


def _whole(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` inside a frame that the compiler does not skip."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


def _budgeted(call: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """`call`, with the share of activations that graphs compiled within it keep. Set around each call, because a new
    shape may compile at any of them, and other models have their own.
    """

    from torch._functorch import config

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return call(*args, **kwargs)

    return run


def _check(plan: CompilePlan) -> None:
    backends = torch._dynamo.list_backends(exclude_tags=())
    if plan.backend not in backends:
        near = difflib.get_close_matches(plan.backend, backends, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        fix = f"{hint}known backends: {', '.join(sorted(backends))}"
        raise ConfigError(Problem("torch_compile_backend", plan.backend, fix))
    if plan.options:
        _check_options(plan)
    if plan.mode is not None and plan.backend != _INDUCTOR:
        fix = f"modes belong to the {_INDUCTOR} backend, and the backend is {plan.backend!r}; drop one of the two"
        raise ConfigError(Problem("torch_compile_mode", plan.mode, fix))


def _check_options(plan: CompilePlan) -> None:
    """Check the options of inductor. Other backends check their own when the first graph is compiled."""
    if plan.mode is not None:
        fix = f"torch takes a mode or options, and the mode is {plan.mode!r}; drop one of the two"
        raise ConfigError(Problem("compile.options", plan.options, fix))
    if plan.backend != _INDUCTOR:
        return
    known = set(torch._inductor.list_options())
    for name, value in plan.options.items():
        if name.replace("-", "_") not in known:
            fix = f"inductor has no such option{did_you_mean(name, known)}"
            raise ConfigError(Problem(f"compile.options.{name}", value, fix))
    try:
        torch.compile(len, backend=plan.backend, options=plan.options)  # compiles nothing before it is called
    except (RuntimeError, TypeError) as error:
        raise ConfigError(Problem("compile.options", plan.options, str(error))) from error


class CompileCounts:
    """Counts the graphs that `torch.compile` captures within `counting`.

    Attributes:
        graphs: all of them.
        recompilations: those of code that was compiled before, for other inputs.
    """

    def __init__(self) -> None:
        self.graphs, self.recompilations = 0, 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the body."""
        from torch._dynamo.callback import callback_handler  # takes a second

        callback_handler.register_start_callback(self._note)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._note)

    def _note(self, event: Any) -> None:
        if event.callback_trigger.name == "DYNAMO":
            self.graphs += 1
            # "frame/attempt", such as "3/0" for the first of a piece of code.
            self.recompilations += not str(event.compile_id).endswith("/0")
