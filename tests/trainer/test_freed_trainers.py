"""A Trainer that a script does not use any more does not stay in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.small import Net, arguments, rows
from torch import nn

from windlass import Trainer


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Python does not look for cycles by itself, as in most of a short program."""
    gc.disable()
    yield
    gc.enable()


class LargeNet(Net):
    """With 68 MiB of weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(17 << 20), requires_grad=False)


def trained(folder: Path, model: nn.Module) -> Trainer:
    args = arguments(folder, max_steps=2, save_strategy="no")
    made = Trainer(model, args, train_dataset=rows(16))
    made.train()
    return made


def test_the_next_one_frees_a_large_model_that_is_not_used(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", LargeNet())
    model, optimizer = weakref.ref(first.model), weakref.ref(first.optimizer)
    del first
    Trainer(Net(), arguments(tmp_path / "next"))
    assert (model(), optimizer()) == (None, None)


def test_in_a_loop_a_large_model_is_freed_before_the_next_is_trained(tmp_path: Path) -> None:
    """While the next one is made, its variable still refers to the one before."""
    one = trained(tmp_path / "first", LargeNet())
    model = weakref.ref(one.model)
    one = Trainer(Net(), arguments(tmp_path / "next", max_steps=2), train_dataset=rows(16))
    assert model() is not None
    one.train()
    assert model() is None


def test_of_many_small_ones_few_stay(tmp_path: Path) -> None:
    models = weakref.WeakSet[nn.Module]()
    for number in range(40):
        models.add(Trainer(Net(), arguments(tmp_path / str(number))).model)
    assert len(models) < 20


def test_one_that_is_used_stays(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", LargeNet())
    second = trained(tmp_path / "second", Net())
    assert first.evaluate(rows(8))["eval_loss"] > 0
    assert second.model is not first.model
