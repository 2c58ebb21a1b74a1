"""Linear layers of 4 or 8 bits without memory: what bitsandbytes keeps of them, and makes for each product.

Its own layers pack the weights that they load, which tensors without memory do not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError

# Elements that have a scale in fp32 together; with `double_quant` its bits are 8, and 256 scales share one.
_BLOCK, _SCALE_BITS, _DOUBLE_BITS = 64, 32.0, 8.0 + 32 / 256


class FewBitsLinear(nn.Linear):
    """In the place of a linear layer: packed weights, which forward and backward each unpack.

    Args:
        layer: whose place it takes.
        config: a `BitsAndBytesConfig`.
    """

    def __init__(self, layer: nn.Linear, config: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        count = layer.weight.numel()
        self._compute: torch.dtype | None = None
        bits, stored = 8.0, torch.int8
        if config.load_in_4bit:
            scale = _DOUBLE_BITS if config.bnb_4bit_use_double_quant else _SCALE_BITS
            bits, stored = 4.0, config.bnb_4bit_quant_storage
            self._compute = config.bnb_4bit_compute_dtype
            self.register_buffer(
                "scales", torch.empty(int(count * scale / _BLOCK / 8), dtype=torch.uint8), False
            )
        else:
            # LLM.int8 has one scale for each row.
            self.register_buffer("scales", torch.empty(layer.out_features, dtype=torch.float32), False)
        # One column, as bitsandbytes packs them.
        packed = torch.empty(int(count * bits / 8 / stored.itemsize), 1, dtype=stored)
        self.weight = nn.Parameter(packed, requires_grad=False)
        vars(self.weight)["quant_state"] = None  # what marks packed weights
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        # Of 8 bits, bitsandbytes multiplies in fp16, whatever the dtype of the activations.
        shape, dtype = (self.out_features, self.in_features), self._compute or torch.float16
        product: Tensor = _Product.apply(input.to(dtype), self.weight, shape)  # type: ignore[no-untyped-call]
        result = product if self.bias is None else product + self.bias.to(dtype)
        return result.to(input.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(packed)
        return nn.functional.linear(given, _unpacked(packed, shape, given.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [packed] = ctx.saved_tensors
        return gradient @ _unpacked(packed, ctx.shape, gradient.dtype), None, None


def _unpacked(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


def pack(model: Any, config: Any) -> None:
    """Replace the linear layers of a model of transformers as loading it with `config` does: all but its head and what
    `llm_int8_skip_modules` names. Raises ModelError for another way to quantize.
    """
    if type(config).__name__ != "BitsAndBytesConfig":
        raise ModelError(
            f"a plan of weights quantized by {type(config).__name__} is not built, only by BitsAndBytesConfig; leave "
            "the quantization out"
        )
    head = model.get_output_embeddings()
    skipped = tuple(config.llm_int8_skip_modules or ())
    for name, module in list(model.named_modules()):
        for child, layer in list(module.named_children()):
            path = f"{name}.{child}" if name else child
            if type(layer) is nn.Linear and layer is not head and not any(part in path for part in skipped):
                setattr(module, child, FewBitsLinear(layer, config))
    model.quantization_method = "bitsandbytes"
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bool(config.load_in_4bit), bool(config.load_in_8bit)
