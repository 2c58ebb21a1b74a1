"""Everything in float64: layers that compute in float32 for stability keep the float64 that they are given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_TO_ONE_DTYPE = ("float", "half", "bfloat16")
_WITH_DTYPE = ("to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum")


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, a float64 tensor is not rounded to fewer bits: norms, softmax and losses of models cast to float32.
    Whole numbers become float64 where a model has them as floats: it may multiply positions by a matrix in float64. So
    do zeros to which it adds: the balancing loss of experts counts tokens in float32.

    Two layouts add in different orders. In float64 that differs by 1e-16, and a fault by far more; after a cast to
    float32 the two could not be told apart. Methods are replaced, since a mode of PyTorch is off in the backward, where
    layers are computed again.
    """
    owners: tuple[Any, ...] = (Tensor, torch)
    kept = {
        (owner, name): getattr(owner, name)
        for owner in owners
        for name in (*_TO_ONE_DTYPE, *_WITH_DTYPE)
        if callable(getattr(owner, name, None))
    }
    for (owner, name), real in kept.items():
        setattr(owner, name, _wide(real, name in _TO_ONE_DTYPE))
    kept[torch, "zeros"] = zeros = torch.zeros
    torch.zeros = _wide_options(zeros)
    try:
        yield
    finally:
        for (owner, name), real in kept.items():
            setattr(owner, name, real)


def _wide(real: Callable[..., Any], always: bool) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or args[0].dtype not in (torch.float64, torch.int64):
            return real(*args, **options)
        return args[0].double() if always else wide(*args, **options)

    wide = _wide_options(real)
    return call


def _wide_options(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        options = {name: torch.float64 if _is_narrow(value) else value for name, value in options.items()}
        return real(*args, **options)

    return call


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW
