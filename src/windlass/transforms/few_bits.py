"""Layers of 4 bits (bitsandbytes): they stay as they were loaded, so that gradients pass through them, and are sent to
other ranks with their scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.tensors import dtype_name
from windlass.dist.gang import Gang


def keep_trainable(model: nn.Module) -> None:
    """Switch off the packing of 4-bit layers for inference. Call it before the first forward in eval mode.

    On processors with bf16 instructions, bitsandbytes packs such a layer in its first forward in eval mode. No gradient
    passes through packed layers, in training mode neither, and their scales are rounded to bf16: a run would go on
    without an error and learn nothing, and an evaluation would change the weights that it evaluates. Raises ModelError
    if a layer was packed before.
    """
    for name, layer in model.named_modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        state: Any = getattr(layer.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"{name}: bitsandbytes packed this 4-bit layer for inference when the model ran in eval mode, and no "
                "gradient passes through it any more. Load the model again and train before it is evaluated, or set "
                "`support_avx512bf16_for_cpu = False` on its Linear4bit layers before they are used"
            )
        layer.support_avx512bf16_for_cpu = False


def share_scales(weight: Tensor, loss_ranks: Gang) -> list[Tensor]:
    """Make room for rank 0's scales of a packed weight, on its device, and return them; none of another weight. The
    layer and the weight have them in one object, which is changed. Collective.
    """
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return []
    # Ranks that have read no weights have a state without tensors. What is sent is JSON.
    described = loss_ranks.broadcast_object(_described(state) if loss_ranks.rank == 0 else None)
    if _described(state) != described:
        _remake(state, described)
    state.to(weight.device)
    nested = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [state.absmax, state.code, *nested]


def _described(state: Any) -> dict[str, Any]:
    """The attributes of a quantization state as plain values, with the shapes and dtypes of its tensors."""
    return {name: _plain(value) for name, value in vars(state).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": [dtype_name(value.dtype), list(value.shape)]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, tuple):
        return {"shape": list(value)}
    return {"state": _described(value)} if hasattr(value, "absmax") else {"value": value}


def _remake(state: Any, described: dict[str, Any]) -> None:
    for name, entry in described.items():
        ((kind, value),) = entry.items()
        if kind == "tensor":
            value = torch.empty(value[1], dtype=getattr(torch, value[0]))
        elif kind == "dtype":
            value = getattr(torch, value)
        elif kind == "shape":
            value = torch.Size(value)
        elif kind == "state":
            inner = type(state)(absmax=None)
            _remake(inner, value)
            value = inner
        setattr(state, name, value)
