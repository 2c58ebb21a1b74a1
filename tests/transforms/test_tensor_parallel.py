"""Which layers a plan divides, and which models are refused. What ranks compute is in `tests/trainer/`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from windlass.core.errors import ConfigError
from windlass.transforms.tensor_parallel import chosen_layers


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


@pytest.mark.parametrize(
    ("tied", "ranks", "head"),
    [(False, 2, True), (True, 2, False), (False, 4, False)],
    ids=["divided", "tied", "a vocabulary of 6 for 4 ranks"],
)
def test_a_plan_names_the_layers(tied: bool, ranks: int, head: bool) -> None:
    found = {name: style for name, (_, style) in chosen_layers(Net(PLAN, tied), ranks).items()}
    # The blocks are one module, of which names are counted once.
    assert found == {"layers.0.up": "colwise", **({"head": "colwise_gather_output"} if head else {})}


@pytest.mark.parametrize(
    ("plan", "fix"),
    [
        (None, "has no plan for tensor parallelism"),
        ({}, "has no plan for tensor parallelism"),
        ({"layers.*.up": "diagonal"}, "has the style 'diagonal'"),
        ({"blocks.*.up": "colwise"}, "none of its layers has a name of its plan"),
        ({"layers.*.norm": "colwise"}, "is a LayerNorm, and only nn.Linear is divided"),
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
