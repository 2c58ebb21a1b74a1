"""Which modules are the repeated blocks of a model."""

from __future__ import annotations

from tests.transforms.test_recompute import Block
from torch import nn

from windlass.transforms.blocks import repeated_blocks


def test_a_block_that_stands_in_several_places_is_taken_once() -> None:
    block = Block(2)
    assert list(repeated_blocks(nn.ModuleList([block, block]))) == [block]


def test_blocks_are_the_outermost_repeated_ones() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    tower = nn.ModuleDict(
        {"encoder": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), "head": nn.Linear(8, 2)}
    )
    nested = nn.ModuleList([nn.Sequential(Block(2), Block(2)), nn.Sequential(Block(2), Block(2))])
    mixed = nn.Sequential(nn.Linear(2, 2), Block(2), Block(2), nn.Sequential(Block(2), Block(2)))
    assert list(repeated_blocks(tower)) == list(tower["encoder"].layers)  # type: ignore[arg-type]
    assert list(repeated_blocks(nn.ModuleDict({"n": nested}))) == list(nested)
    assert list(repeated_blocks(nn.ModuleDict({"m": mixed}))) == [mixed[1], mixed[2], *mixed[3]]  # type: ignore[misc]


def test_a_bare_list_of_blocks_counts_too() -> None:
    model = nn.Sequential(Block(2), Block(2))
    assert list(repeated_blocks(model)) == list(model)
