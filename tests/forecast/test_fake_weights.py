"""Models that `from_pretrained` makes without memory have the sizes of those that it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forecast.models import llama, mixture
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from windlass.core.device import without_accelerators
from windlass.core.errors import ModelError
from windlass.forecast.fake_weights import fake_weights, new_mode

SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def classifier() -> Any:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, intermediate_size=128))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=4))


def t5() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=64, d_kv=16, d_ff=96, num_layers=1))


def bytes_of(model: nn.Module) -> dict[str, int]:
    """Of weights that are trained, and of all, with the scales of those in few bits."""
    parameters = list(model.parameters())
    scales = [buffer for name, buffer in model.named_buffers() if name.endswith(".scales")]
    for parameter in parameters:
        state = getattr(parameter, "quant_state", None)  # of bitsandbytes, for 4 bits
        if state is not None:
            scales += [state.absmax, *([state.state2.absmax] if state.nested else [])]
        scales += (
            [found] if isinstance(found := getattr(parameter, "SCB", None), Tensor) else []
        )  # for 8 bits
    return {
        "trained": sum(p.nbytes for p in parameters if p.requires_grad),
        "all": sum(p.nbytes for p in parameters) + sum(each.nbytes for each in scales),
    }


def check(kind: Any, folder: Path, **options: Any) -> None:
    loaded = bytes_of(kind.from_pretrained(folder, **options))
    with without_accelerators(), fake_weights(new_mode()):
        planned = bytes_of(kind.from_pretrained(folder, **options))
    assert planned == loaded


@pytest.mark.parametrize("make", [llama, classifier, gpt2, t5])
@pytest.mark.parametrize(
    "few",
    [
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        {"load_in_8bit": True},
    ],
    ids=["4", "double", "8"],
)
def test_the_layers_that_loading_packs_are_packed(make: Any, few: dict[str, Any], tmp_path: Path) -> None:
    """Not the head of a classifier, but linear layers of another class; those that a model keeps in fp32 are not."""
    pytest.importorskip("bitsandbytes")
    model = make()
    model.save_pretrained(tmp_path)
    check(type(model), tmp_path, quantization_config=BitsAndBytesConfig(**few))


def test_names_of_skipped_layers_mean_what_they_mean_for_loading(tmp_path: Path) -> None:
    """A head that they do not name is packed, and they are no parts of names. They may be given in a mapping."""
    pytest.importorskip("bitsandbytes")
    model = llama()
    model.save_pretrained(tmp_path)
    for skipped in (["q_proj"], ["lm_head", "proj"], ["model.layers.1"]):
        given = {"load_in_4bit": True, "llm_int8_skip_modules": skipped, "quant_method": "bitsandbytes"}
        check(type(model), tmp_path, quantization_config=given)


def test_the_dtype_of_stored_weights_decides_if_the_configuration_does_not(tmp_path: Path) -> None:
    model = llama().bfloat16()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(type(model), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_a_model_keeps_in_fp32_are_planned_so(dtype: torch.dtype, tmp_path: Path) -> None:
    t5().save_pretrained(tmp_path)
    check(T5ForConditionalGeneration, tmp_path, dtype=dtype)


def test_the_sizes_are_those_of_a_configuration_that_lies_elsewhere(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "weights")
    llama(layers=1).config.save_pretrained(tmp_path / "other")
    check(LlamaForCausalLM, tmp_path / "weights", config=str(tmp_path / "other"))


def test_what_is_reported_beside_a_model_and_how_experts_compute_are_those_of_loading(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    options = {"config": model.config, "experts_implementation": "batched_mm", "output_loading_info": True}
    loaded, info = MixtralForCausalLM.from_pretrained(tmp_path, **options)
    with without_accelerators(), fake_weights(new_mode()):
        planned, planned_info = MixtralForCausalLM.from_pretrained(tmp_path, **options)
    assert planned_info.keys() == info.keys()
    assert planned.config._experts_implementation == loaded.config._experts_implementation == "batched_mm"
    assert model.config._experts_implementation != "batched_mm", "the configuration of the caller stays"


@pytest.mark.parametrize("kind", [LlamaForCausalLM, AutoModelForCausalLM])
def test_an_adapter_is_refused_where_loading_puts_it_on_its_base(kind: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "own")
    folder = str(tmp_path / "own")
    with without_accelerators(), fake_weights(new_mode()):
        with pytest.raises(ModelError, match="own holds an adapter, which a plan does not load"):
            kind.from_pretrained(folder)
        planned = peft.PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), folder)
    assert sum(p.numel() for p in planned.parameters()) == sum(p.numel() for p in base.parameters())
