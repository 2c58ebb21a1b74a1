"""Causal attention of many documents in one kernel: that of `torch.nn.attention.varlen`, from torch 2.10 on.

It is flash attention, so no scores are stored, and a document costs the square of its own length.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from windlass.core.optional import is_available
from windlass.core.tensors import autocast_dtype

_MODULE = "torch.nn.attention.varlen"
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes these: halves on an NVIDIA GPU from compute capability 8.0 on, with heads of equal
    sizes that it has.
    """
    size = query.shape[-1]
    return (
        query.is_cuda
        and torch.version.hip is None
        and (autocast_dtype(query) or query.dtype) in _HALVES
        and size == key.shape[-1] == value.shape[-1]
        and size % 8 == 0
        and size <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and is_available(_MODULE)
    )


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Attention in which a token sees those before it in its own document.

    Args:
        query: shape (rows, heads, tokens, size); `key` and `value` may have fewer heads.
        borders: where the documents of all rows begin, and the end of the last one: int32, on the device of `query`.
        longest: tokens of the longest document.

    Returns:
        Shape (rows, tokens, heads, size).
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, length, size = query.shape
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}  # nothing after a token: causal
    if heads != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            key, value = (part.repeat_interleave(heads // key.shape[1], dim=1) for part in (key, value))
    # Autocast does not reach operators that were added later; some norms of queries give float32 under it.
    dtype = autocast_dtype(query) or query.dtype
    flat = [part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (query, key, value)]
    of_all: Any = varlen_attn
    attended: Tensor = of_all(*flat, borders, borders, longest, longest, **options)
    return attended.reshape(rows, length, heads, size)
