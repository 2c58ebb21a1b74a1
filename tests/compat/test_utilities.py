"""Memory, seeds, loggers and local SGD of user-owned loops."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch
from torch import nn

from windlass.accelerator.device_cache import should_reduce_batch_size
from windlass.compat.batch_size import find_executable_batch_size, release_memory
from windlass.compat.rank_logging import get_logger
from windlass.compat.state import AcceleratorState, PartialState
from windlass.core.errors import ModelError


@pytest.mark.dist
def test_two_processes() -> None:
    assert launch(2, Path(__file__).with_name("helpers_ranks.py")).count("helpers are right") == 2


@pytest.fixture
def stateless() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_logger_asks_who_we_are(stateless: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="create a PartialState"):
        get_logger("script").warning("who says so?")
    PartialState(cpu=True)
    get_logger("script").warning("I do")
    assert caplog.messages == ["[RANK 0] I do"]


def test_sizes_shrink_until_they_fit_and_stay() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, factor: int, *, word: str = "") -> tuple[int, str]:
        tried.append(batch_size)
        if batch_size > 75:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size * factor, word

    assert train(2, word="x") == (144, "x")
    assert tried == [100, 90, 81, 72]
    assert train(1) == (72, "")
    assert tried[4:] == [72]


def test_a_size_of_ones_own_choosing() -> None:
    sizes = iter([50, 20])

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return batch_size

    assert train() == 20


def test_what_does_not_fit_is_let_go_before_the_next_try() -> None:
    held: list[weakref.ref[nn.Module]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        assert not any(ref() for ref in held), "the model of the last try is still there"
        model = nn.Linear(1, 1)
        held.append(weakref.ref(model))
        raise MemoryError if batch_size > 1 else KeyError("another error")

    with pytest.raises(KeyError, match="another error"):
        train()
    assert len(held) == 2


def test_nothing_fits() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ModelError, match="not even one of a single sample"):
        train()


def test_the_batch_size_is_not_the_callers_to_give() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: object) -> None: ...

    with pytest.raises(TypeError, match="leave the batch size out"):
        train(128, "model")


def test_other_errors_are_no_reason() -> None:
    assert not should_reduce_batch_size(RuntimeError("shapes do not fit"))
    assert not should_reduce_batch_size(KeyError("out of memory"))


def test_released_objects_are_gone() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    ref = weakref.ref(model)
    model, other = release_memory(model, other)
    gc.collect()
    assert model is None
    assert other is None
    assert ref() is None
