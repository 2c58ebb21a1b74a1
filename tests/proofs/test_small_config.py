from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.cli.proving.families import FAMILIES, config_of

from windlass.core.errors import ModelError
from windlass.proofs.small_config import AxisLayout, check_kinds, shrink

transformers = pytest.importorskip("transformers")
TENSOR = AxisLayout.parse("tp=2")


def small(model_type: str, layout: AxisLayout = TENSOR, **options: Any) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[model_type](**options)
    return shrink(config.to_dict(), config.attribute_map, layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_is_built_of_every_family_and_shrinks_no_further(family: str) -> None:
    import torch

    config = config_of(family)
    made = type(config).from_dict(shrink(config.to_dict(), config.attribute_map, TENSOR))
    assert shrink(made.to_dict(), made.attribute_map, TENSOR) == shrink(
        config.to_dict(), config.attribute_map, TENSOR
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000


def test_each_kind_of_layer_stays_in_its_order() -> None:
    window = small("gemma3_text")
    assert window["layer_types"] == ["sliding_attention", "full_attention"]
    assert window["sliding_window"] == 5
    rope = small("smollm3")
    assert rope["no_rope_layers"] == [1, 0]
    mixed = small("qwen3_moe", decoder_sparse_step=2)
    assert (mixed["num_hidden_layers"], mixed["mlp_only_layers"], mixed["decoder_sparse_step"]) == (2, [0], 1)
    dense_first = small("deepseek_v3")
    assert (dense_first["num_hidden_layers"], dense_first["first_k_dense_replace"]) == (2, 1)
    assert small("llama", AxisLayout.parse("pp=4"))["num_hidden_layers"] == 4


def test_heads_keep_their_ratio_and_what_divides_them() -> None:
    four = small("llama", num_attention_heads=32, num_key_value_heads=8)
    assert (four["num_attention_heads"], four["num_key_value_heads"]) == (16, 4)
    one = small("llama", num_attention_heads=32, num_key_value_heads=1)
    assert one["num_key_value_heads"] == 1
    odd = small("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64)
    assert (odd["num_attention_heads"], odd["num_key_value_heads"]) == (9, 3)  # refused as the large one is
    assert small("gpt2")["vocab_size"] % 2 == transformers.GPT2Config().vocab_size % 2 == 1


def test_dropout_is_off_and_the_rest_is_kept() -> None:
    found = small("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, scale_attn_by_inverse_layer_idx=True)
    assert (found["resid_pdrop"], found["attn_pdrop"], found["scale_attn_by_inverse_layer_idx"]) == (
        0.0,
        0.0,
        True,
    )
    scaled = small("granite", residual_multiplier=0.22, tie_word_embeddings=True)
    assert (scaled["residual_multiplier"], scaled["tie_word_embeddings"]) == (0.22, True)
    long = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4,
            "original_max_position_embeddings": 4096}  # fmt: skip
    rope = small("phi3", rope_parameters=long)["rope_parameters"]
    assert (len(rope["long_factor"]), rope["original_max_position_embeddings"]) == (4, 16)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="t5 is not a decoder of text alone"):
        small("t5")
    with pytest.raises(ModelError, match="vit has no"):
        small("vit")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        # Their classes compute from several numbers which layers have attention.
        ("jamba", "are of 3 kinds, of which its small model would have 2"),
        ("recurrent_gemma", "are of 2 kinds, of which its small model would have 1"),
        # Its class compares sizes of layers that other models do not have.
        ("bamba", "cannot be made small: .*Mamba head state do not match"),
    ],
)
def test_a_model_whose_kinds_of_layers_cannot_be_kept_is_refused(model_type: str, reason: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    with pytest.raises(ModelError, match=f"type {model_type} {reason}"):
        check_kinds(config, shrink(config.to_dict(), config.attribute_map, TENSOR))


def test_transformers_says_nothing_of_the_small_model(caplog: pytest.LogCaptureFixture) -> None:
    """A run looks its layout up: a warning would be taken for one of its own model."""
    config, library = transformers.CONFIG_MAPPING["gpt_oss"](), logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        check_kinds(config, shrink(config.to_dict(), config.attribute_map, TENSOR))
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
