"""Which parameters decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.optim.helpers import Net
from torch import nn

from windlass.optim.groups import decay_groups, decay_parameter_names


def transformers_names(model: nn.Module) -> list[str]:
    trainer = pytest.importorskip("transformers.trainer")
    return trainer.Trainer.get_decay_parameter_names(None, model)


WORDS = [
    "layernorm",
    "norm",
    "q_norm",
    "normal",
    "bias",
    "Biased",
    "attn",
    "input_layernorm",
    "rmsnorm",
    "block",
    "w",
]
LEAVES = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.LayerNorm(2), lambda: nn.Embedding(2, 2)])
TREES = st.recursive(
    LEAVES.map(lambda make: make()),
    lambda children: st.dictionaries(st.sampled_from(WORDS), children, min_size=1, max_size=3).map(
        nn.ModuleDict
    ),
    max_leaves=8,
)


@given(TREES)
def test_names_equal_transformers(model: nn.Module) -> None:
    assert decay_parameter_names(model) == transformers_names(model)


def test_names_of_a_real_model_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    model = transformers.BertForSequenceClassification(config)
    assert decay_parameter_names(model) == transformers_names(model)


def test_groups_keep_the_models_order_and_hold_every_trainable_parameter_once() -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    decaying, kept = decay_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in decaying["params"]] == [
        "scale", "layers.0.attn.weight", "layers.1.attn.weight", "head.weight",
    ]  # fmt: skip
    assert [names[id(p)] for p in kept["params"]] == [
        "bias", "layers.0.attn.bias", "layers.0.ln.weight", "layers.0.ln.bias",
        "layers.1.attn.bias", "layers.1.ln.weight", "layers.1.ln.bias", "q_norm.weight",
    ]  # fmt: skip
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


def test_without_weight_decay_the_groups_are_the_same_ones() -> None:
    model = Net()
    plain, usual = decay_groups(model, 0.0), decay_groups(model, 0.1)
    assert [group["weight_decay"] for group in plain] == [0.0, 0.0]
    for one, other in zip(plain, usual, strict=True):
        assert all(a is b for a, b in zip(one["params"], other["params"], strict=True))


def test_there_are_two_groups_also_if_all_parameters_decay_or_none() -> None:
    for model in (nn.Linear(2, 2, bias=False), nn.LayerNorm(2)):
        lengths = [len(group["params"]) for group in decay_groups(model, 0.0)]
        assert len(lengths) == 2
        assert sum(lengths) == len(list(model.parameters()))


def test_tied_parameters_are_in_one_group_once() -> None:
    model = Net()
    model.head.weight = model.embed.weight
    held = [p for group in decay_groups(model, 0.1) for p in group["params"]]
    assert len({id(p) for p in held}) == len(held) == len(list(model.parameters()))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.RMSNorm(2), nn.InstanceNorm1d(2, affine=True)]
)
def test_torchs_other_norms_do_not_decay_whatever_their_name(norm: nn.Module) -> None:
    assert decay_parameter_names(nn.ModuleDict({"bn": norm, "fc": nn.Linear(2, 2)})) == ["fc.weight"]


def test_the_callers_names_replace_ours() -> None:
    model = Net()
    decaying, kept = decay_groups(model, 0.1, ["bias"])
    assert decaying["params"] == [model.bias]
    assert len(kept["params"]) == len(list(model.parameters())) - 1
    assert torch.is_tensor(kept["params"][0])
