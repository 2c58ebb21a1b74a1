"""Training for weights of few bits: linear layers compute with rounded weights and inputs, through torchao.

Weights keep their dtype and are rounded in each forward; the backward passes gradients on as if they were not (straight
through, arXiv:1308.3432). So state dicts, checkpoints and optimizers are those of the plain model. The layers are those
that `from_pretrained` quantizes with a `TorchAoConfig`: a quantized export computes what training computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.sections.fields import QAT_SCHEMES
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.transforms.linear_exchange import exchange, same

_log = get_job_logger(__name__)
GROUP = 32  # weights of 4 bits that share a scale
_SMALLEST = 1e-12  # largest value of a row of zeros, which has no scale otherwise
_PURPOSE = "train for weights of few bits (qat)"


def apply_qat(model: nn.Module, scheme: str | None) -> None:
    """Convert linear layers of `model` in place; their parameters stay the same objects. A second call changes nothing.

    Args:
        model: of transformers.
        scheme: a key of `QAT_SCHEMES`; None changes nothing.

    Raises:
        ConfigError: the model is another one, has adapters or quantized weights, or a layer or all of them cannot be
            converted.
        MissingDependencyError: torchao is not installed.
    """
    if scheme is None:
        return
    library = require("torchao.quantization.qat", _PURPOSE)
    if any(isinstance(module, library.FakeQuantizedLinear) for module in model.modules()):
        return
    _check_model(model, scheme)
    layers = dict(_layers(model, scheme))
    if not layers:
        fix = f"{type(model).__name__} has no linear layer of torch that it rounds; leave it out"
        raise ConfigError(Problem("qat", scheme, fix))
    require("torchao.quantization", _PURPOSE).quantize_(
        model,
        library.QATConfig(quantized_config(scheme), step="prepare"),
        filter_fn=lambda _, name: name in layers,
    )
    if scheme == "float8":
        for module in model.modules():
            if isinstance(module, library.FakeQuantizedLinear):
                module.activation_fake_quantizer = _StraightThrough(module.activation_fake_quantizer)
                module.weight_fake_quantizer = _StraightThrough(module.weight_fake_quantizer)
    total = sum(isinstance(module, nn.Linear) for module in model.modules())
    _log.info(
        "qat=%s: %d of %d linear layers compute with %s", scheme, len(layers), total, QAT_SCHEMES[scheme]
    )


def quantized_config(scheme: str) -> Any:
    """Return torchao's configuration of the quantized weights that `scheme` trains for."""
    library = require("torchao.quantization", _PURPOSE)
    sizes: Any = require("torchao.quantization.granularity", _PURPOSE)
    dtypes: Any = torch  # whose stubs lack int4
    row, group = sizes.PerAxis(0), sizes.PerGroup(GROUP)
    if scheme == "float8":
        return library.Float8DynamicActivationFloat8WeightConfig(
            granularity=sizes.PerRow(), activation_value_lb=_SMALLEST
        )
    kind, dtype, granularity = {
        "int8": (library.Int8DynamicActivationIntxWeightConfig, dtypes.int8, row),
        "int4": (library.Int8DynamicActivationIntxWeightConfig, dtypes.int4, group),
        "int8_weight_only": (library.IntxWeightOnlyConfig, dtypes.int8, row),
        "int4_weight_only": (library.IntxWeightOnlyConfig, dtypes.int4, group),
    }[scheme]
    return kind(dtype, granularity)


class _StraightThrough(nn.Module):
    """A float8 rounding of torchao, whose own backward rounds gradients to float8 without a scale: small ones vanish,
    and large ones become NaN.
    """

    def __init__(self, rounding: Any) -> None:
        super().__init__()
        self.rounding, self.config = rounding, rounding.config
        self.config.hp_value_lb = _SMALLEST

    def forward(self, value: Tensor) -> Tensor:
        return exchange(value, self.rounding, same)


def _check_model(model: nn.Module, scheme: str) -> None:
    problem = None
    if getattr(model, "quantization_method", None) is not None:
        problem = "the weights of the model are quantized already; load it without quantization_config"
    elif hasattr(model, "peft_config"):
        problem = (
            "trains all weights of linear layers, and an adapter leaves them frozen; leave the adapter out, or train "
            "it on a base of few bits (quantization_config)"
        )
    elif not isinstance(model, require("transformers", _PURPOSE).PreTrainedModel):
        problem = (
            f"needs a model of transformers, which an export can quantize, and {type(model).__name__} is not"
        )
    if problem is not None:
        raise ConfigError(Problem("qat", scheme, problem))


def _layers(model: Any, scheme: str) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that transformers quantizes: all but the output layer, and those that it keeps in float32. Raises
    ConfigError for one that cannot be converted.
    """
    kind = require("transformers.quantizers.quantizer_torchao", _PURPOSE).TorchAoHfQuantizer
    config = require("transformers", _PURPOSE).TorchAoConfig(quantized_config(scheme))
    quantizer = kind(config, pre_quantized=False)
    kept = getattr(model, "_keep_in_fp32_modules", None)
    quantizer.modules_to_not_convert = quantizer.get_modules_to_not_convert(model, None, kept)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not quantizer.param_needs_quantization(
            model, f"{name}.weight"
        ):
            continue
        if type(module) is not nn.Linear:
            fix = f"{name} is a {type(module).__name__}, which has a product of its own; leave qat out"
            raise ConfigError(Problem("qat", scheme, fix))
        if scheme.startswith("int4") and module.in_features % GROUP:
            fix = (
                f"{name} has {module.in_features} inputs, and its weights are rounded in groups of {GROUP}; use "
                f"{scheme.replace('int4', 'int8')!r}"
            )
            raise ConfigError(Problem("qat", scheme, fix))
        yield name, module
