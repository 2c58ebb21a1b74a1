"""A model as `from_pretrained` makes it, on the meta device: for a process that gets its weights from another one."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from windlass.core.optional import require
from windlass.optim.registry import bitsandbytes_library

_PURPOSE = "load a model"
# Where a model is looked for.
OF_CONFIG = frozenset(
    {
        "revision",
        "trust_remote_code",
        "token",
        "cache_dir",
        "subfolder",
        "local_files_only",
        "force_download",
        "proxies",
    }
)
# How weights are read, and where they lie: without them nothing to decide.
_OF_READING = frozenset(
    {
        "device_map",
        "max_memory",
        "low_cpu_mem_usage",
        "use_safetensors",
        "weights_only",
        "variant",
        "key_mapping",
    }
    | {"offload_folder", "offload_buffers", "offload_state_dict", "ignore_mismatched_sizes"}
)
_MADE_WITH = OF_CONFIG | {"dtype", "attn_implementation", "quantization_config"}


def model_without_weights(kind: Any, config: Any, options: dict[str, Any]) -> nn.Module | None:
    """Return the model without reading any weights; None if it is quantized in another way than to 4 bits
    (bitsandbytes), or an option that is not a setting of the config may need its weights.

    Args:
        kind: the class, or one that chooses a class by the config.
        options: of `from_pretrained`.
    """
    settings = {k: v for k, v in options.items() if k not in _MADE_WITH | _OF_READING}
    form = options.get("quantization_config")
    stored = getattr(config, "quantization_config", None)
    if not all(_is_setting(config, name) for name in settings):
        return None
    if not all(map(_is_four_bits, filter(None, (form, stored)))):
        return None
    config = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(config, name, value)
    quantizer = None if form is stored is None else _quantizer(config, form)
    dtype = options["dtype"]
    # What is stored in few bits is not converted. Else "auto".
    if stored is not None or not isinstance(dtype, torch.dtype):
        dtype = config.dtype or torch.get_default_dtype()
    chosen = {k: v for k, v in options.items() if k == "attn_implementation" and v is not None}
    with torch.device("meta"):
        if hasattr(kind, "from_config"):  # a class that chooses one by the config
            remote = {k: v for k, v in options.items() if k == "trust_remote_code"}
            model: Any = kind.from_config(config, dtype=dtype, **chosen, **remote)
        else:
            model = kind._from_config(config, dtype=dtype, **chosen)
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    if quantizer is not None:
        _pack(model, dtype)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    model.tie_weights()
    if hasattr(model, "generation_config"):
        where = {k: v for k, v in options.items() if k in OF_CONFIG}
        _read_generation(model, config.name_or_path, {**where, **settings})
    empty: nn.Module = model.eval()
    return empty


def _is_setting(config: Any, name: str) -> bool:
    """Whether `from_pretrained` sets this option in the config, and not in one that is a part of it."""
    return hasattr(config, name) and not hasattr(getattr(config, name), "to_dict")


def _read_generation(model: Any, name: str, options: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # most models have no such file
        model.generation_config = type(model.generation_config).from_pretrained(name, **options)


def _is_four_bits(form: Any) -> bool:
    """True for a configuration of transformers, or its dict, of 4 bits of bitsandbytes."""
    if isinstance(form, dict):
        return bool(form.get("load_in_4bit"))
    return bool(getattr(form, "load_in_4bit", False))


def _quantizer(config: Any, form: Any) -> Any:
    """That of transformers for a model of this config; sets its quantization in the config."""
    found = require("transformers.quantizers.auto", _PURPOSE).get_hf_quantizer(config, form, None, True, {})
    return found[0]


def _pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Give layers of 4 bits packed weights on the meta device. Their scales have no elements: they come with the
    weights (`share_scales`).
    """
    library = bitsandbytes_library(_PURPOSE)
    for layer in model.modules():
        if not isinstance(layer, library.nn.Linear4bit):
            continue
        weight: Any = layer.weight
        width = 2 * weight.quant_storage.itemsize  # numbers of 4 bits in one element
        packed = torch.empty(
            ((weight.numel() + width - 1) // width, 1), dtype=weight.quant_storage, device="meta"
        )
        state = library.functional.QuantState(
            absmax=torch.empty(0),
            shape=torch.Size((layer.out_features, layer.in_features)),
            code=torch.empty(0),
            blocksize=weight.blocksize,
            quant_type=weight.quant_type,
            dtype=dtype,
        )
        layer.weight = library.nn.Params4bit(
            packed,
            requires_grad=False,
            quant_state=state,
            blocksize=weight.blocksize,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
            module=layer,
            bnb_quantized=True,
        )
        layer.quant_state = state
