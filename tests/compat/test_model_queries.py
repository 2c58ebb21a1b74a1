from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, trainer_optimizer, trainer_pt_utils
from transformers import trainer_utils as reference

from windlass.compat import model_queries as ours


@pytest.fixture(scope="module")
def model() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))


@pytest.mark.parametrize("types", [[], [nn.LayerNorm], [nn.Embedding, nn.LayerNorm]])
@pytest.mark.parametrize("names", [None, [r"bias"], [r"^weight", r"attn\."]])
def test_names_of_parameters(model: Any, types: list[Any], names: Any) -> None:
    found = ours.get_parameter_names(model, types, names)
    assert found == trainer_pt_utils.get_parameter_names(model, types, names)


def test_counts_and_classes(model: Any) -> None:
    model.transformer.wte.weight.requires_grad_(False)
    for trainable in (False, True):
        wanted = trainer_pt_utils.get_model_param_count(model, trainable)
        assert ours.get_model_param_count(model, trainable) == wanted
    for name in ("GPT2Block", "GPT2LMHeadModel", "NoSuchClass"):
        wanted = trainer_pt_utils.get_module_class_from_name(model, name)
        assert ours.get_module_class_from_name(model, name) is wanted
    model.transformer.wte.weight.requires_grad_(True)


def test_parameters_that_zero_3_left_empty_count_whole() -> None:
    layer = nn.Linear(0, 0, bias=False)
    layer.weight.ds_numel = 12
    assert ours.get_model_param_count(layer) == 12


@pytest.mark.parametrize("mixed", [False, True])
def test_wrappers_of_peft(mixed: bool) -> None:
    bare = nn.Sequential(nn.Linear(2, 2))
    config = peft.LoraConfig(target_modules=["0"], r=1)
    wrapped: Any = peft.get_peft_model(bare, config, mixed=mixed)  # type: ignore[arg-type]
    assert ours.is_peft_model(wrapped)
    assert not ours.is_peft_model(bare)
    assert ours.unwrap_peft_model(wrapped) is reference.unwrap_peft_model(wrapped)
    assert ours.unwrap_peft_model(bare) is bare


def _quantized(**attributes: Any) -> Any:
    quantizer = SimpleNamespace(
        is_trainable=attributes.pop("trainable", True),
        is_qat_trainable=attributes.pop("qat", False),
        quantization_config=SimpleNamespace(quant_method="x"),
    )
    return SimpleNamespace(is_quantized=True, hf_quantizer=quantizer, **attributes)


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        _quantized(),
        _quantized(qat=True),
        _quantized(qat=True, trainable=False),
        _quantized(_hf_peft_config_loaded=True),
        _quantized(qat=True, _orig_mod=None),
    ],
)
def test_the_same_quantized_models_are_refused(model: Any) -> None:
    try:
        reference.validate_quantization_for_training(model)
    except ValueError:
        with pytest.raises(ValueError, match="quantized"):
            ours.validate_quantization_for_training(model)
    else:
        ours.validate_quantization_for_training(model)


_CAUSAL = torch.tril(torch.ones(4, 4))


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.ones(2, 4),
        torch.ones(4),
        _CAUSAL[None],
        torch.ones(1, 4, 4),
        _CAUSAL[None, None].repeat(2, 3, 1, 1),
        torch.full((1, 1, 4, 4), -1e9).triu(1),
        torch.ones(1, 1, 1, 1),
        torch.ones(1, 2, 4, 4),
    ],
)
def test_masks(mask: Any) -> None:
    assert ours.is_attention_mask_causal(mask) is bool(trainer_pt_utils.is_attention_mask_causal(mask))


@pytest.mark.parametrize("targets", ["a.b", r".*\.attn", "all", ["attn"], ["mlp", r".*\.b"], [r"x.*b"], []])
@pytest.mark.parametrize("key", ["a.b", "x.attn", "x.a.b"])
def test_targets(targets: Any, key: str) -> None:
    for both in (False, True):
        found = ours.check_target_module_exists(targets, key, return_is_regex=both)
        assert found == reference.check_target_module_exists(targets, key, return_is_regex=both)


def test_questions_about_optimizers() -> None:
    plain = [torch.ones(1), torch.zeros(2)]
    assert ours.has_mixed_dtensor(plain) is trainer_optimizer.has_mixed_dtensor(plain) is False
    for thing in (torch.optim.SGD, torch.nn.Linear, lambda parameters: None):
        assert ours.is_optimizer_factory(thing) is trainer_optimizer.is_optimizer_factory(thing)


def test_special_tokens_come_from_a_tokenizer_or_its_processor(model: Any) -> None:
    tokenizer = SimpleNamespace(pad_token_id=3, bos_token_id=4, eos_token_id=None)
    ours.align_special_tokens(model, SimpleNamespace(tokenizer=tokenizer))
    assert (model.config.pad_token_id, model.generation_config.bos_token_id) == (3, 4)
