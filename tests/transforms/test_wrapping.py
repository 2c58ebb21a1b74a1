"""Which modules are sharded on their own."""

from __future__ import annotations

import pytest
from tests.transforms.fsdp_ranks import Block, Tiny
from torch import nn

from windlass.config.plan import ShardPlan
from windlass.core.errors import ConfigError
from windlass.transforms.wrapping import ignored_parameters, units_of


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(4), Block(4)


class Nested(nn.Module):
    """Blocks within pairs, which say themselves that they must not be split."""

    _no_split_modules = ("Pair", "Elsewhere")

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([Pair(), Pair()])
        self.out = nn.Linear(4, 2)


def names(module: nn.Module, plan: ShardPlan, ignored: str | tuple[str, ...] | None = None) -> list[str]:
    known = {member: name for name, member in module.named_modules()}
    return [known[unit] for unit in units_of(module, plan, ignored_parameters(module, ignored))]


def test_layers_of_the_given_classes_and_those_that_a_model_names() -> None:
    tiny = ShardPlan(wrap="transformer", layers=("Block",))
    assert names(Tiny(), tiny) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(Nested(), ShardPlan(wrap="transformer")) == ["pairs.0", "pairs.1"]
    assert names(Nested(), tiny) == ["pairs.0.first", "pairs.0.second", "pairs.1.first", "pairs.1.second"]
    both = ShardPlan(wrap="transformer", layers=("Pair", "LayerNorm"))
    assert names(Nested(), both)[:3] == ["pairs.0", "pairs.1", "pairs.0.first.norm"], (
        "outer ones before the inner ones, which are sharded in reverse"
    )
    assert names(Tiny(), ShardPlan(wrap="transformer")) == names(Tiny(), tiny), (
        "what repeats, if no list is given"
    )
    assert names(nn.Linear(2, 2), ShardPlan(wrap="transformer")) == names(Tiny(), ShardPlan()) == []


def test_a_module_inside_several_units_comes_after_them_all() -> None:
    shared = Pair()
    shared.second.up = shared.first.up
    found = names(shared, ShardPlan(wrap="transformer", layers=("Block", "Linear")))
    assert found[:2] == ["first", "second"]


def test_layers_whose_parameters_are_ignored_are_no_units() -> None:
    plan = ShardPlan(wrap="transformer", layers=("Block",))
    assert names(Tiny(), plan, r"blocks\.[01]") == ["blocks.2"]
    assert names(Tiny(), plan, ("blocks.2",)) == ["blocks.0", "blocks.1"]


def test_a_class_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)to_wrap='Layer'.*has no module of this class.*: Linear, Block, LayerNorm"
    ):
        names(Tiny(), ShardPlan(wrap="transformer", layers=("Layer", "Block")))


def test_a_size_counts_what_no_inner_unit_holds() -> None:
    block = sum(parameter.numel() for parameter in Block(4).parameters())
    assert names(Nested(), ShardPlan(wrap="size", min_parameters=block)) == [
        "pairs.0.first", "pairs.0.second", "pairs.1.first", "pairs.1.second",
    ]  # fmt: skip
    assert names(Nested(), ShardPlan(wrap="size", min_parameters=block + 1)) == ["pairs.0", "pairs.1"]
    assert names(Nested(), ShardPlan(wrap="size", min_parameters=10**9)) == []


def test_units_that_share_a_weight_are_left_to_what_holds_them_all() -> None:
    module = Nested()
    module.pairs[0].second.up.weight = module.pairs[1].first.up.weight
    blocks = ShardPlan(wrap="transformer", layers=("Block",))
    assert names(module, blocks) == ["pairs.0.first", "pairs.1.second"]
    both = ShardPlan(wrap="transformer", layers=("Pair", "Block"))
    assert names(module, both) == ["pairs.0.first", "pairs.1.second"], "nor are those around them"
    inside = Nested()
    inside.pairs[0].second.up.weight = inside.pairs[0].first.up.weight
    assert names(inside, ShardPlan(wrap="transformer")) == ["pairs.0", "pairs.1"], "a tie within one unit"


def test_scalars_are_never_sharded_and_unknown_names_are_refused() -> None:
    module = Tiny()
    assert ignored_parameters(module, None) == {module.scale}
    assert module.mixer.weight in ignored_parameters(module, "mixer")
    with pytest.raises(ConfigError, match=r"(?s)ignored_modules='mixr, blokcs'.*there are: embed, mixer"):
        ignored_parameters(module, ("mixr", "mixer", "blokcs"))
    with pytest.raises(ConfigError, match="no such module"):
        ignored_parameters(module, "mix")
