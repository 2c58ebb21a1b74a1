"""Which layers a plan divides, and which models are refused. What ranks compute is in `tests/trainer/`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.trainer.small import llama
from torch import nn

from windlass.core.errors import ConfigError
from windlass.transforms.tensor_plan import chosen_layers


class Net(nn.Module):
    """Two blocks, and a head that may be tied to the embedding."""

    def __init__(self, plan: Any, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, width), "norm": nn.LayerNorm(4)})] * 2)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.tp_plan = plan


PLAN = {"layers.*.up": "colwise", "head": "colwise_gather_output", "embed": "embedding_rowwise"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, True), (4, False)], ids=["3 + 3", "2 + 2 + 2 + 0"])
def test_a_plan_names_the_layers(tied: bool, ranks: int, vocabulary: bool) -> None:
    found = {name: style for name, (_, style) in chosen_layers(Net(PLAN, tied), ranks).items()}
    split = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    # The blocks are one module, of which names are counted once.
    assert found == {"layers.0.up": "colwise", **(split if vocabulary else {})}


def test_tied_layers_are_divided_together_or_not_at_all() -> None:
    head_alone = {name: style for name, style in PLAN.items() if name != "embed"}
    assert set(chosen_layers(Net(head_alone, tied=True), 2)) == {"layers.0.up"}
    assert set(chosen_layers(Net(head_alone), 2)) == {"layers.0.up", "head"}
    whole = Net(PLAN)
    for kind in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        whole.embed = nn.Embedding(6, 4, **kind).requires_grad_(False)
        assert set(chosen_layers(whole, 2)) == {"layers.0.up", "head"}
    net = Net({"layers.*.up": "colwise", "other": "colwise"})
    net.other = nn.Linear(4, 8)
    assert set(chosen_layers(net, 2)) == {"layers.0.up", "other"}
    net.third = nn.Linear(4, 8)
    net.third.weight = net.layers[0]["up"].weight  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="is tied to a layer that is not divided in the same way"):
        chosen_layers(net, 2)


@pytest.mark.parametrize(
    ("plan", "fix"),
    [
        (None, "has no plan for tensor parallelism"),
        ({}, "has no plan for tensor parallelism"),
        ({"layers.*.up": "diagonal"}, "has the style 'diagonal'"),
        ({"blocks.*.up": "colwise"}, "none of its layers has a name of its plan"),
        ({"layers.*.norm": "colwise"}, "is a LayerNorm, and only nn.Linear is divided"),
        ({"layers.*.up": "packed_colwise"}, "is the style of a parameter of a layer of experts"),
        (
            {"layers.*.up": "colwise", "layers.*.up.weight": "packed_colwise"},
            "is the style of a parameter of a layer of experts",
        ),
    ],
)
def test_a_plan_that_divides_nothing_is_refused(plan: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        chosen_layers(Net(plan), 2)


def test_sizes_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_size=2: must divide the size of layers.0.up, which is 7"):
        chosen_layers(Net(PLAN, width=7), 2)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=8, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ConfigError, match=r"tp_size=4: must divide num_key_value_heads, which is 2"):
        chosen_layers(model, 4)
    assert "lm_head" in chosen_layers(model, 2)


def test_learnt_keys_and_values_of_all_heads_are_refused() -> None:
    peft = pytest.importorskip("peft")
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(
        ConfigError, match="peft_config='PrefixTuningConfig': learns keys and values of all heads"
    ):
        chosen_layers(peft.get_peft_model(llama(), prefixes), 2)


def test_families_without_a_plan_have_one_and_layers_of_experts_are_divided() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    assert {name: style for name, (_, style) in chosen_layers(gpt2, 2).items()} == {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.0.attn.c_attn": "colwise_gather_output",
        "transformer.h.0.attn.c_proj": "rowwise_split_input",
        "transformer.h.0.mlp.c_fc": "colwise",
        "transformer.h.0.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    attention = nn.Module()
    net = Net({"layers.*.up": "colwise", "attention": "own_heads"})
    net.attention = attention
    with pytest.raises(ConfigError, match="counts its heads in none of num_heads"):
        chosen_layers(net, 2)
    attention.num_heads = 4  # type: ignore[assignment]
    assert "attention" in chosen_layers(net, 2)
    with pytest.raises(ConfigError, match="or not in a multiple of tp_size=8"):
        chosen_layers(net, 8)
    options = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 6}
    experts = {"num_local_experts": 4, "num_key_value_heads": 6, "vocab_size": 12, "head_dim": 2}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options, **experts))
    assert chosen_layers(mixtral, 2)["model.layers.0.mlp.experts"][1] == "moe_tp_experts"
    with pytest.raises(
        ConfigError,
        match=r"tp_size=3: must divide the experts of model.layers.0.mlp.experts, which are 4",
    ):
        chosen_layers(mixtral, 3)
