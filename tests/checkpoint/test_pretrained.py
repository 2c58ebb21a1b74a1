"""The files of a model of transformers are those that its `save_pretrained` writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from windlass.checkpoint.files import Files
from windlass.checkpoint.pretrained import (
    by_names_in_memory,
    file_layout,
    overrides_saving,
    write_configurations,
)
from windlass.checkpoint.tensor_file import open_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME, load_weights, save_weights
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import Part
from windlass.trainer.model_writer import ModelWriter, WrittenBeside

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **changes))


def mixtral() -> Any:
    """A mixture of experts, whose experts are one tensor in memory and one file entry each: the eleventh has the index
    10, which comes before 2 among words.
    """
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=11, num_experts_per_tok=2)
    )


def qwen_moe() -> Any:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **TEXT,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    )


def qwen_vision() -> Any:
    """A vision-language model, whose language model has another name in files."""
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def llava() -> Any:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 8,
    }  # fmt: skip
    config = transformers.LlavaConfig(text_config={"model_type": "llama", **TEXT}, vision_config=vision)
    return transformers.LlavaForConditionalGeneration(config)


def t5() -> Any:
    """An encoder-decoder, with embeddings tied three times."""
    sizes = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    sizes = {
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = transformers.BartConfig(
        vocab_size=31, d_model=8, encoder_layers=1, decoder_layers=1, max_position_embeddings=16, **sizes
    )
    return transformers.BartForConditionalGeneration(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return transformers.BertForMaskedLM(config)


def whisper() -> Any:
    """Positions that files leave out, because the model computes them."""
    config = transformers.WhisperConfig(
        vocab_size=40, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=4,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_source_positions=8, pad_token_id=0,
        max_target_positions=8, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "bfloat16": lambda: llama().to(torch.bfloat16),
    "mixture of experts": mixtral,
    "another mixture of experts": qwen_moe,
    "vision and language": qwen_vision,
    "another of vision and language": llava,
    "encoder-decoder": t5,
    "another encoder-decoder": bart,
    "masked language model": bert,
    "speech": whisper,
}  # fmt: skip


def written(model: nn.Module, folder: Path) -> Path:
    ModelWriter(model, None).write(folder, None, WrittenBeside(None, dict))
    (folder / "training_args.json").unlink()
    return folder


def assert_same_files(ours: Path, theirs: Path) -> None:
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    for path in theirs.glob("*.json"):
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    mine, other = load_file(ours / WEIGHTS_NAME), load_file(theirs / WEIGHTS_NAME)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name
    with safe_open(ours / WEIGHTS_NAME, "pt") as a, safe_open(theirs / WEIGHTS_NAME, "pt") as b:
        assert a.metadata() == b.metadata()


def scramble(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_writes_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    ours = written(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_files(ours, tmp_path / "theirs")


@pytest.mark.parametrize("family", FAMILIES)
def test_comes_back_to_the_bit(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written(model, tmp_path)
    load_weights(tmp_path, scramble(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_memory_are_read_too(family: str, tmp_path: Path) -> None:
    """Checkpoints of earlier versions, and the parts of ranks, have them."""
    model = FAMILIES[family]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(tmp_path, model.state_dict())
    load_weights(tmp_path, scramble(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("family", ["mixture of experts", "vision and language"])
def test_a_model_that_was_loaded_is_saved_with_the_names_that_it_was_loaded_with(
    family: str, tmp_path: Path
) -> None:
    first = FAMILIES[family]()
    first.save_pretrained(tmp_path / "start")
    model = type(first).from_pretrained(tmp_path / "start")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_files(written(model, tmp_path / "ours"), tmp_path / "theirs")
    load_weights(tmp_path / "ours", scramble(FAMILIES[family]()))  # one that was not loaded
    load_weights(tmp_path / "start", scramble(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, first.state_dict()[name]), name


def test_a_conversion_without_an_inverse_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys and queries of unequal size, joined: cut in the middle they do not come back."""
    loading = pytest.importorskip("transformers.core_model_loading")
    model = llama()
    joined = loading.WeightConverter(
        "self_attn.qk_proj.weight",
        ["self_attn.q_proj.weight", "self_attn.k_proj.weight"],
        [loading.Chunk(dim=0)],
    )
    model._weight_conversions = [joined]
    model.save_pretrained(tmp_path / "theirs")
    assert any("qk_proj" in name for name in load_file(tmp_path / "theirs" / WEIGHTS_NAME))
    with caplog.at_level(logging.WARNING):
        written(model, tmp_path / "ours")
    assert "LlamaForCausalLM is saved with the names that its weights have in memory" in caplog.text
    assert load_file(tmp_path / "ours" / WEIGHTS_NAME).keys() == model.state_dict().keys()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_weights(tmp_path / "ours", scramble(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_trained_weights_are_never_left_out(tmp_path: Path) -> None:
    model = llama()
    model._keys_to_ignore_on_save = {"lm_head.weight", "model.norm.weight"}
    model.model.norm.weight.requires_grad_(False)
    stored = load_file(written(model, tmp_path) / WEIGHTS_NAME)
    assert "lm_head.weight" in stored
    assert "model.norm.weight" not in stored
    load_weights(tmp_path, model)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    written(mixtral(), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this 2"):
        load_weights(tmp_path, llama())


def test_only_models_of_transformers_have_a_layout(tmp_path: Path) -> None:
    assert file_layout(nn.Linear(2, 2)) is None
    assert not overrides_saving(nn.Linear(2, 2))
    model = llama()
    assert not overrides_saving(model)
    model.save_pretrained = lambda folder: None
    assert overrides_saving(model)
    model.hf_quantizer = object()  # whose weights `save_pretrained` packs
    assert file_layout(model) is None


def test_weights_with_a_tie_that_the_model_does_not_declare_come_back(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_weights(written(model, tmp_path), scramble(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_part_of_a_tensor_that_is_made_of_several_is_read(tmp_path: Path) -> None:
    model = mixtral()
    whole = model.state_dict()
    part = Part((1, 0, 2), (4, 3, 5))
    with open_tensors(written(model, tmp_path) / WEIGHTS_NAME, Files()) as source:
        found = by_names_in_memory(source, whole.keys(), model)
        for name in (name for name in whole if name.endswith("experts.down_proj")):
            assert torch.equal(found.read(name, part), part.of(whole[name]))


def test_configurations_name_the_class_as_its_script_does(tmp_path: Path) -> None:
    sharded, other = llama(), nn.Linear(2, 2)
    sharded.__class__ = type("FSDPLlamaForCausalLM", (type(sharded),), {})  # as FSDP2 renames it
    other.config = transformers.LlamaConfig(**TEXT)
    for model, name in ((sharded, "LlamaForCausalLM"), (other, "Linear")):
        before = vars(model.config).copy()
        write_configurations(model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
        assert vars(model.config) == before, "the script's own, of which it may make another model"
