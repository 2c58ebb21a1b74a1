"""Models that are compiled block by block."""

from __future__ import annotations

from typing import Any

import accelerate.utils as reference
import pytest
import torch
from tests.compat.big_models import IDS, Model, seeded
from tests.versions import needs
from torch import nn

from windlass import Accelerator, utils


def _spread(module: nn.Module) -> list[tuple[str, str]]:
    return [(name, type(part).__name__) for name, part in module.named_modules()]


@needs("accelerate", "1.8", "older ones do not compile regions")
@pytest.mark.parametrize("build", [seeded, lambda: seeded().blocks, lambda: nn.Linear(2, 2)])
def test_the_same_modules_are_compiled_as_by_the_peer(build: Any) -> None:
    model = build()
    found, theirs = (
        utils.compile_regions(model, backend="eager"),
        reference.compile_regions(model, backend="eager"),
    )
    assert _spread(found) == _spread(theirs)
    for question in ("has_compiled_regions", "is_compiled_module"):
        for module in (found, model):
            assert getattr(utils, question)(module) == getattr(reference, question)(module)


def test_the_copy_computes_the_same_and_shares_the_weights() -> None:
    model = seeded()
    before = _spread(model)
    compiled = utils.compile_regions(model, backend="eager")
    assert type(compiled) is Model
    assert _spread(model) == before
    assert torch.equal(compiled(IDS), model(IDS))
    compiled(IDS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Doubled(nn.ModuleList):
    """A list with a forward of its own, and one block in several places."""

    def __init__(self) -> None:
        block = nn.Linear(2, 2)
        super().__init__([block, block, nn.Linear(2, 2)])

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        for block in self:
            row = torch.tanh(block(row))
        return row


class Places(nn.Module):
    """Modules with several names, and a name without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.same = Doubled()
        self.head = nn.Linear(2, 2)
        self.head = None  # type: ignore[assignment]

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        assert self.head is None
        return self.same(self.blocks(row))  # type: ignore[no-any-return]


def test_a_block_in_several_places_is_called_in_each() -> None:
    torch.manual_seed(0)
    model, row = Places(), torch.ones(1, 2)
    compiled = utils.compile_regions(model, backend="eager")
    assert torch.equal(compiled(row), model(row))
    assert compiled.blocks is compiled.same
    assert [name for name, _ in compiled.blocks.named_children()] == ["0", "2"]


def test_a_prepared_copy_is_saved_under_the_names_of_the_model(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = seeded()
    prepared = accelerator.prepare(utils.compile_regions(model, backend="eager"))
    assert accelerator.get_state_dict(prepared).keys() == model.state_dict().keys()
    assert accelerator.unwrap_model(prepared) is not None
