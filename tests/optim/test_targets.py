"""Which weights are projected."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.optim.helpers import Net, decay_groups, heard
from torch import nn

from windlass.core.errors import ConfigError
from windlass.optim.targets import projected_groups, target_weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = nn.Linear(4, 4), nn.Linear(4, 8), nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def names(model: nn.Module, targets: Any) -> list[str]:
    chosen = target_weights(model, targets)
    return [name for name, p in model.named_parameters() if id(p) in chosen]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["attn"], ["layers.0.attn", "layers.1.attn"]),
        (["attn", "mlp"], ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"]),
        (["layers.1.mlp"], ["layers.1.mlp"]),
        ([r".*\.0\..*"], ["layers.0.attn", "layers.0.mlp"]),
        (r"layers\.\d\.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.0.attn", ["layers.0.attn"]),
        ("all-linear", ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"]),
        ("all_linear", ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"]),
    ],
)
def test_targets_are_parts_of_names_expressions_or_paths(targets: Any, expected: list[str]) -> None:
    assert names(Model(), targets) == [f"{name}.weight" for name in expected]


@pytest.mark.parametrize("targets", [["attn", "attention"], "attn", ["norm"], ["embed"], "[", ["head"]])
def test_a_target_that_names_no_linear_layer_is_refused(targets: Any) -> None:
    with pytest.raises(ConfigError, match="optim_target_modules"):
        target_weights(Model(), targets)


def test_the_error_shows_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"attention.*layers\.0\.attn, layers\.0\.mlp"):
        target_weights(Model(), ["attention"])


def test_groups_keep_their_options_and_the_rest_is_logged_once() -> None:
    model = Net()
    with heard(logging.INFO) as records:
        groups = projected_groups(model, decay_groups(model, 0.1), ["attn"])
    assert [group.get("projected", False) for group in groups] == [False, False, True]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [r.getMessage() for r in records] == [
        "gradients of 2 weights are projected; 11 other parameters are updated conventionally"
    ]


def test_targets_that_are_frozen_are_refused() -> None:
    model = Model()
    model.layers.requires_grad_(False)
    with pytest.raises(ConfigError, match="is trained"):
        projected_groups(model, decay_groups(model, 0.0), ["attn"])
