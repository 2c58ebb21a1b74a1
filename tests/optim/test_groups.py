"""Which parameters decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.optim.helpers import Net, decay_groups
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError
from windlass.optim.groups import (
    check_group_options,
    decay_parameter_names,
    parameter_groups,
)


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


def grouped(**plan: Any) -> list[tuple[list[str], dict[str, Any]]]:
    model = Net()
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        ([names[id(p)] for p in group.pop("params")], group)
        for group in parameter_groups(model, OptimizerPlan(weight_decay=0.1, learning_rate=1.0, **plan))
    ]


def test_patterns_get_groups_of_their_own_after_the_usual_two() -> None:
    groups = grouped(groups={r"layers\.1": {"lr": 0.5}, "embed|head": {"lr": 0.25, "weight_decay": 0.0}})
    assert [options for _, options in groups] == [
        {"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.1, "lr": 0.5},
        {"weight_decay": 0.0, "lr": 0.5}, {"weight_decay": 0.0, "lr": 0.25},
    ]  # fmt: skip
    assert [names for names, _ in groups][2:] == [
        ["layers.1.attn.weight"], ["layers.1.attn.bias", "layers.1.ln.weight", "layers.1.ln.bias"],
        ["embed.weight", "head.weight"],
    ]  # fmt: skip
    assert len({name for names, _ in groups for name in names}) == len(list(Net().parameters()))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"embedd": {"lr": 1.0}},
            "'embedd': matches no trainable parameter; did you mean 'embed'?; names are scale, bias",
        ),
        ({"head": {"lr": 1.0}, "weight$": {"lr": 2.0}}, "matches 'head.weight', which 'head' matches too"),
    ],
)
def test_patterns_that_match_nothing_or_the_same_are_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grouped(groups=groups)
    assert message in str(caught.value)


def test_the_learning_rate_falls_from_layer_to_layer() -> None:
    rates = {
        name: options["lr"]
        for names, options in grouped(layer_decay=0.5, groups={"head": {"lr": 3.0}})
        for name in names
    }
    assert rates["embed.weight"] == rates["bias"] == 0.125
    assert rates["layers.0.attn.weight"] == rates["layers.0.ln.weight"] == 0.25
    assert rates["layers.1.attn.bias"] == 0.5
    assert rates["q_norm.weight"] == 1.0
    assert rates["head.weight"] == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 1.0}, r"learning_rate.*a group takes lr"),
        ({"betas": [0.9]}, r"betas=\[0.9\]: must be 2 numbers"),
        ({"betas": "ab"}, r"betas='ab': must be 2 numbers"),
        ({"eps": None}, r"eps=None: must be a number"),
        ({"amsgrad": "no"}, r"amsgrad='no': must be true or false, as False"),
        ({"amsgrad": 1}, r"amsgrad=1: must be true or false"),
        ({"proj_type": True}, r"proj_type=True: must be text, as std"),
        ({"beta1": 1.5}, r"beta1=1\.5: must be at least 0 and below 1"),
        ({"beta1": "high"}, r"beta1='high': must be a number"),
        ({"clip_threshold": 0.0}, r"clip_threshold=0\.0: must be above 0"),
    ],
)
def test_an_option_that_the_optimizer_cannot_use_is_refused(options: dict[str, Any], message: str) -> None:
    defaults = {
        "lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "fused": None, "amsgrad": False,
        "proj_type": "std", "beta1": None, "clip_threshold": 1.0,
    }  # fmt: skip
    check_group_options({"head": {"lr": 1, "betas": [0, 0.5], "fused": True, "amsgrad": True}}, defaults)
    check_group_options({"head": {"proj_type": "right", "beta1": None}, "tail": {"beta1": 0.5}}, defaults)
    check_group_options({"head": {"eps": (None, 1e-4)}}, {"eps": (None, 1e-3)})
    with pytest.raises(ConfigError, match=rf"optim_groups\['head'\]\.{message}"):
        check_group_options({"head": options}, defaults)


def test_a_models_own_norm_does_not_decay_whatever_its_name() -> None:
    class GainNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

    assert decay_parameter_names(nn.ModuleDict({"ln": GainNorm(), "fc": nn.Linear(2, 2)})) == ["fc.weight"]
