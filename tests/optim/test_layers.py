"""The depth of parameters."""

from __future__ import annotations

import pytest
from tests.optim.helpers import Net
from torch import nn

from windlass.core.errors import ConfigError
from windlass.optim.groups import layers_above


def test_layers_are_counted_from_the_output() -> None:
    above = layers_above(Net())
    assert above["embed.weight"] == above["scale"] == 3
    assert above["layers.0.attn.weight"] == above["layers.0.ln.bias"] == 2
    assert above["layers.1.attn.weight"] == 1
    assert above["q_norm.weight"] == above["head.weight"] == 0


def test_a_real_model_with_two_stacks() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=3, num_decoder_layers=2, num_heads=2, vocab_size=20
    )
    above = layers_above(transformers.T5ForConditionalGeneration(config))
    assert above["shared.weight"] == 4
    assert above["encoder.block.0.layer.0.SelfAttention.q.weight"] == 3
    assert above["decoder.block.0.layer.0.SelfAttention.q.weight"] == 2
    assert above["decoder.block.1.layer.0.SelfAttention.q.weight"] == 1
    assert above["decoder.final_layer_norm.weight"] == 0


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no layers in an nn\.ModuleList"):
        layers_above(nn.Linear(2, 2))
