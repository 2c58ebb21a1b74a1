"""Compile a model block by block (`accelerate.utils.compile_regions`), as a copy that shares its weights."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from windlass.accelerator.forward import is_compiled_module


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of a model whose repeated blocks, and the modules beside them, are compiled one by one.

    The code of one block is compiled once for all blocks of its class. The model itself is not changed; the copy
    shares its parameters and buffers. `torch_compile_blocks=True` of `TrainingArguments` compiles blocks in place.

    Args:
        compile_kwargs: arguments of `torch.compile`.
    """
    copy: nn.Module = _compiled(module, compile_kwargs)
    copy.__dict__.setdefault("_orig_mod", module)  # what unwrapping a compiled model reads
    return copy


def has_compiled_regions(module: nn.Module) -> bool:
    """Return True if the module or one in it is compiled by `torch.compile` or `compile_regions`."""
    return next(module.children(), None) is not None and any(map(is_compiled_module, module.modules()))


def _compiled(module: nn.Module, options: dict[str, Any]) -> Any:
    if not any(map(_is_repeated, module.modules())):
        return torch.compile(module, **options)
    # Without the constructor, whose arguments are not known.
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if getattr(value, "__self__", None) is module and hasattr(value, "__func__"):
            copy.__dict__[name] = MethodType(value.__func__, copy)  # a forward that was replaced
    whole = _is_repeated(module)
    parts: dict[Any, Any] = {
        child: torch.compile(child, **options) if whole else _compiled(child, options)
        for child in module.children()
    }
    # Children of its own: those of the module stay as they are. One may have several places, and a place be empty.
    copy.__dict__["_modules"] = {name: parts.get(child) for name, child in copy.__dict__["_modules"].items()}
    return copy


def _is_repeated(module: nn.Module) -> bool:
    """Whether a module is a list of blocks of one class."""
    blocks = list(module.children())
    return (
        isinstance(module, nn.ModuleList)
        and bool(blocks)
        and all(isinstance(b, type(blocks[0])) for b in blocks)
    )
