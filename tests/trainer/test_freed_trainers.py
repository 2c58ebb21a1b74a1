"""What lives as long as a Trainer, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python does not look for cycles on its own, as in most of a short program."""
    gc.disable()
    yield
    gc.enable()


def trained(folder: Path) -> Trainer:
    made = Trainer(Net(), arguments(folder, max_steps=2), train_dataset=rows(16))
    made.train()
    return made


@pytest.mark.usefixtures("no_collection")
def test_the_next_one_frees_a_trainer_that_is_not_used(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    model, optimizer = weakref.ref(first.model), weakref.ref(first.optimizer)
    del first
    Trainer(Net(), arguments(tmp_path / "next"))
    assert (model(), optimizer()) == (None, None)


@pytest.mark.usefixtures("no_collection")
def test_in_a_loop_a_trainer_is_freed_before_the_next_trains(tmp_path: Path) -> None:
    """While the next one is made, its variable still refers to the one before."""
    one = trained(tmp_path / "first")
    model = weakref.ref(one.model)
    one = Trainer(Net(), arguments(tmp_path / "next", max_steps=2), train_dataset=rows(16))
    assert model() is not None
    one.train()
    assert model() is None


@pytest.mark.usefixtures("no_collection")
def test_a_trainer_that_is_used_stays(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    second = trained(tmp_path / "second")
    assert first.evaluate(rows(8))["eval_loss"] > 0
    assert second.model is not first.model
