"""Where a model is cut into the stages of a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError
from windlass.transforms.pipeline_cut import example_of, find_cut


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.inner(states)


class Decoder(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(7, 4), nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7)
        self.dummy_inputs = {"ids": torch.arange(5)[None]}

    def forward(self, ids: Tensor) -> Tensor:
        states = self.drop(self.table(ids))
        for layer in self.layers:
            states = layer(states)
        head: Tensor = self.head(self.norm(states))
        return head


def test_blocks_are_shared_out_with_more_on_the_first() -> None:
    model = Decoder(5)
    cut, result = find_cut(model, 3, (), example_of(model))
    assert cut.stages == [
        ["table", "drop", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "norm", "head"],
    ]
    assert cut.last == ["layers.1", "layers.3"]
    assert result.shape == (1, 5, 7)


def test_a_stage_ends_with_the_tensor_that_the_next_begins_with() -> None:
    model = Decoder(1)
    cut, _ = find_cut(model, 2, ["layers.0"], example_of(model))
    assert cut.stages == [["table", "drop"], ["layers.0", "norm", "head"]]
    assert cut.last == ["drop"]


def test_borders_follow_the_order_of_the_calls() -> None:
    """A unit that the forward does not call is the first stage's, which saves it."""
    model = Decoder(3)
    model.unused = nn.Linear(4, 4)
    assert find_cut(model, 2, ["layers.1"], example_of(model))[0].stages[0][-1] == "unused"
    for points in (["layers.2", "layers.1"], ["layers.1", "unused"]):
        with pytest.raises(ConfigError, match="in another order, or not at all"):
            find_cut(model, 3, points, example_of(model))


def test_an_example_is_a_tensor_or_arguments() -> None:
    model, ids = Decoder(2), torch.arange(5)[None]
    for given in (ids, (ids,)):
        model.dummy_inputs = given  # type: ignore[assignment]
        example = example_of(model)
        assert example == ((ids,), {})
        assert find_cut(model, 2, (), example)[0].last == ["layers.0"]


def test_a_plain_sequence_needs_no_example() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert example_of(model) is None
    assert find_cut(model, 2, ["2"], None)[0].stages == [["0", "1"], ["2"]]


class Twice(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.head(self.table(ids))


class WithParameter(Decoder):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "points", "words"),
    [
        (Decoder(1), [], "0 lists of repeated blocks"),
        (Decoder(3), ["layers.3"], "no such module"),
        (Decoder(3), ["layers.1", "layers.2"], "name as many"),
        (Decoder(3), ["table"], "no module before it"),
        (Twice(3), ["layers.1"], "is called 2 times"),
        (WithParameter(3), ["layers.1"], "a module of its own"),
        (nn.ModuleDict({"one": Block()}), ["one"], "no example of its input"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), ["1"], "running statistics"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, points: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_cut(model, 2, points, example_of(model))
