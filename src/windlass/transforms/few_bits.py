"""Layers of 4 bits (bitsandbytes) stay as they were loaded, so that gradients pass through them."""

from __future__ import annotations

from typing import Any

from torch import nn

from windlass.core.errors import ModelError


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
