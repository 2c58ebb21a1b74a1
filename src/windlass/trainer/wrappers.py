"""Signatures of models in wrappers: `torch.compile`, data parallelism, adapters, and wrappers of a script that forward
all arguments.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MAX_WRAPPERS = 16  # a module that holds itself under such a name would have no end


def innermost(module: nn.Module) -> nn.Module:
    """The first module inside the wrappers whose forward names its arguments."""
    for _ in range(_MAX_WRAPPERS):
        inner = _wrapped(module)
        if inner is None:
            break
        module = inner
    return module


def _wrapped(module: nn.Module) -> nn.Module | None:
    compiled = getattr(module, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return compiled
    base: Any = getattr(module, "get_base_model", None)
    if callable(base):
        found = base()
        return found if isinstance(found, nn.Module) and found is not module else None
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind not in _VARIADIC for parameter in parameters):
        return None
    inner = getattr(module, "module", None)
    if isinstance(inner, nn.Module):
        return inner
    children = list(module.children())
    return children[0] if len(children) == 1 else None


def accepts_count(module: nn.Module) -> bool:
    """Return True if the innermost forward accepts `num_items_in_batch`, by its declaration or its signature.

    `**kwargs` count too.
    """
    declared = getattr(module, "accepts_loss_kwargs", None)
    inner = innermost(module)
    declared = getattr(inner, "accepts_loss_kwargs", None) if declared is None else declared
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(inner.forward).parameters
    # `*args, **kwargs` alone hand on everything, and do not show what the model takes.
    named = any(p.kind not in _VARIADIC for p in parameters.values())
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "num_items_in_batch" in parameters or (named and takes_any)


def labels_in_signature(module: nn.Module) -> list[str]:
    """The names of the labels among the arguments of the innermost forward; `["labels"]` if there are none."""
    parameters = inspect.signature(innermost(module).forward).parameters
    found = [name for name in parameters if "label" in name or name in ("start_positions", "end_positions")]
    return found or ["labels"]


def returns_loss_by_default(module: nn.Module) -> bool:
    """Return True if the forward returns a loss without labels (a parameter `return_loss` whose default is True)."""
    parameter = inspect.signature(innermost(module).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True
