"""Everything in float64: layers that compute in float32 for stability keep the float64 that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16}
_TO_ONE_DTYPE = {Tensor.float, Tensor.half, Tensor.bfloat16}


class DoublePrecision(TorchFunctionMode):
    """Within it, a float64 tensor is not rounded to fewer bits: norms, softmax and losses of models cast to float32.

    Two layouts add in different orders. In float64 that differs by 1e-16, and a fault by far more; after a cast to
    float32 the two could not be told apart.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func in _TO_ONE_DTYPE:
                return args[0]
            if options.get("dtype") in _NARROW:
                options["dtype"] = torch.float64
            if func in _CASTS:
                args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        call: Callable[..., Any] = func
        return call(*args, **options)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW
