"""Linear layers of 4 or 8 bits without memory: what bitsandbytes keeps of them, and makes for each product.

Its own layers pack the weights that they load, which tensors without memory do not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.optional import require

# Elements that have a scale together, in 4 bytes; with `double_quant` in one, and so many scales have one of 4 bytes.
_BLOCK, _SCALES = 64, 256


class FewBitsLinear(nn.Linear):
    """In the place of a linear layer: packed weights, which forward and backward each unpack.

    Args:
        layer: whose place it takes; linear, or a `Conv1D` of transformers.
        config: a `BitsAndBytesConfig`.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        nn.Module.__init__(self)
        columns, rows = layer.weight.shape  # of a `Conv1D`
        if isinstance(layer, nn.Linear):
            rows, columns = columns, rows
        self.in_features, self.out_features = columns, rows
        count = layer.weight.numel()
        self._compute: torch.dtype | None = None
        bits, stored = 8.0, torch.int8
        if config.load_in_4bit:
            scales = -(-count // _BLOCK)
            scale_bytes = (
                scales - 4 * (-scales // _SCALES) if config.bnb_4bit_use_double_quant else 4 * scales
            )
            bits, stored = 4.0, config.bnb_4bit_quant_storage
            self._compute = config.bnb_4bit_compute_dtype
        else:
            scale_bytes = 4 * rows
        self.register_buffer("scales", torch.empty(scale_bytes, dtype=torch.uint8), False)
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
    """Replace the layers of a model of transformers that loading it with `config` packs, as transformers chooses them.
    Raises ModelError for another way to quantize.
    """
    if type(config).__name__ != "BitsAndBytesConfig":
        raise ModelError(
            f"a plan of weights quantized by {type(config).__name__} is not built, only by BitsAndBytesConfig; leave "
            "the quantization out"
        )
    library = require("transformers.quantizers", "look at a model")
    is_packed = require("transformers.quantizers.quantizers_utils", "look at a model").should_convert_module
    kept = library.AutoHfQuantizer.from_config(config).get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    kinds = (nn.Linear, require("transformers.pytorch_utils", "look at a model").Conv1D)
    for name, layer in list(model.named_modules()):
        if type(layer) in kinds and is_packed(name, kept):
            model.set_submodule(name, FewBitsLinear(layer, config))
    model.quantization_method = "bitsandbytes"
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bool(config.load_in_4bit), bool(config.load_in_8bit)
