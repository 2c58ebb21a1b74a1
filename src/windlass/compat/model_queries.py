"""Questions about models and their parts that scripts ask: names, sizes, adapters, masks, targets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.dist.sharded import is_sharded
from windlass.optim.groups import parameter_names
from windlass.trainer.defaults import align_special_tokens as _align

_FAR_BELOW = -1e4  # what a mask adds where nothing may be attended to


def get_parameter_names(
    model: nn.Module,
    forbidden_layer_types: Iterable[type],
    forbidden_layer_names: Iterable[str] | None = None,
) -> list[str]:
    """Names of the parameters that do not lie in modules of these types and are not named after these patterns."""
    patterns = [re.compile(pattern) for pattern in forbidden_layer_names or ()]
    return parameter_names(model, tuple(forbidden_layer_types), patterns)


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """How many numbers a model has; with `trainable_only`, those that are trained. Of sharded ones all parts count."""
    counted = (p for p in model.parameters() if p.requires_grad or not trainable_only)
    return sum(getattr(p, "ds_numel", p.numel()) for p in counted)  # ZeRO-3 leaves parameters empty


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of this name among the module and everything inside it; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def is_peft_model(model: Any) -> bool:
    """Return True if `model` is one of peft's wrappers. peft itself is not imported."""
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__}
    return not names.isdisjoint(("peft.PeftModel", "peft.PeftMixedModel"))


def unwrap_peft_model(model: Any) -> Any:
    """The model inside a wrapper of peft; any other model is itself."""
    if not is_peft_model(model):
        return model
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


def validate_quantization_for_training(model: Any) -> None:
    """Check that a quantized model has something that can be trained. Raises ValueError if it is compiled, has no
    adapters, or its quantization does not train.
    """
    # `add_adapter` of transformers puts adapters into a model without a wrapper of peft.
    if not getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        return
    quantizer = getattr(model, "hf_quantizer", None)
    if hasattr(model, "_orig_mod"):
        raise ValueError("a quantized model cannot be compiled and trained; give it without torch.compile")
    if not is_peft_model(model) and not getattr(quantizer, "is_qat_trainable", False):
        raise ValueError(
            "a quantized model cannot be trained itself; put adapters on it (peft.get_peft_model)"
        )
    if not getattr(quantizer, "is_trainable", False):
        raise ValueError(
            f"weights quantized by {type(quantizer).__name__} cannot be trained, not even with adapters; load the "
            "model in another way"
        )


def align_special_tokens(model: nn.Module, processing_class: Any) -> None:
    """Give the model's configurations the special tokens of a tokenizer, or of a processor's tokenizer."""
    _align(model, getattr(processing_class, "tokenizer", processing_class))


def is_attention_mask_causal(attention_mask: Tensor | None) -> bool:
    """Whether a mask lets no position attend to a later one. Waits for the device.

    Args:
        attention_mask: [batch, positions] (padding, which is causal), [batch, positions, positions] or
            [batch, heads, positions, positions], as ones and zeros or as what is added to scores; of the latter two,
            the first sample and head are looked at. None is causal.
    """
    if attention_mask is None or attention_mask.ndim == 2:
        return True
    if attention_mask.ndim not in (3, 4):
        return False
    first = attention_mask.reshape(-1, *attention_mask.shape[-2:])[0]
    later = torch.triu(first, diagonal=1)
    return bool((later <= 1e-6).all() or (later < _FAR_BELOW).all())


def check_target_module_exists(
    optim_target_modules: str | Sequence[str], key: str, return_is_regex: bool = False
) -> bool | tuple[bool, bool]:
    """Whether a module's name is one of the targets.

    Args:
        optim_target_modules: a regular expression for whole names; or a list of parts of names and of such expressions.
        return_is_regex: also return whether an expression matched instead of a name.
    """
    if isinstance(optim_target_modules, str):
        found, by_pattern = bool(re.fullmatch(optim_target_modules, key)), optim_target_modules != key
    else:
        named = any(target in key for target in optim_target_modules)
        by_pattern = not named and any(re.fullmatch(target, key) for target in optim_target_modules)
        found = named or by_pattern
    return (found, by_pattern) if return_is_regex else found


def has_mixed_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors lie on different meshes of processes, or only some of them are spread."""
    return len({tensor.device_mesh if is_sharded(tensor) else None for tensor in tensors}) > 1


def is_optimizer_factory(optimizer_cls_or_factory: Any) -> bool:
    """Whether this makes an optimizer without being a class of optimizers."""
    is_class = isinstance(optimizer_cls_or_factory, type)
    return not (is_class and issubclass(optimizer_cls_or_factory, torch.optim.Optimizer))
