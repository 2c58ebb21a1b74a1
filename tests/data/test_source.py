from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Augmented, Numbers, Stream, train_loader

from windlass.data.batch_reader import pin, wants_pinning
from windlass.data.source import in_order


@given(st.permutations(range(12)))
def test_early_batches_wait_for_their_turn(numbers: list[int]) -> None:
    assert list(in_order((n, str(n)) for n in numbers)) == [str(n) for n in range(12)]


def test_an_error_in_a_worker_arrives_with_the_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise ValueError("bad")
            return index

    with pytest.raises(ValueError, match="reading sample 3 of Broken"):
        list(train_loader(Broken(6), 2, order="sequential", workers=1).groups())


@pytest.mark.parametrize("source", [Augmented, lambda count: Stream(Augmented(count))])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_follow_a_move_of_the_position(source: Any, persistent: bool) -> None:
    """Left in mid-epoch, gone on with, and restored under another seed."""
    loaders = [
        train_loader(source(12), 2, collate=None),
        train_loader(source(12), 2, collate=None, workers=2, persistent_workers=persistent),
    ]
    seen: list[list[Any]] = [[], []]
    for loader, batches in zip(loaders, seen, strict=True):
        batches += [group.batches[0]["x"] for _, group in zip(range(2), loader.groups(), strict=False)]
        batches += [group.batches[0]["x"] for group in loader.groups()]
        loader.load_state_dict({"seed": 9, "epoch": 4, "consumed": 6})
        batches += [group.batches[0]["x"] for group in loader.groups()]
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


class Pair(NamedTuple):
    left: Any
    right: Any


class Encoding(dict):  # type: ignore[type-arg]
    """A dict with more to it, as tokenizers return."""

    def copy(self) -> Encoding:
        return Encoding(self)


@pytest.mark.gpu
def test_pinned_batches_keep_their_shape() -> None:
    if not wants_pinning(True):
        pytest.skip("no accelerator with its own memory")
    x = torch.ones(3)
    batch = {"a": x, "b": [x, (x, 1)], "c": Pair(x, "text"), "d": Encoding(e=x)}
    pinned = pin(batch)
    assert pinned["a"].is_pinned()
    assert pinned["b"][1][0].is_pinned()
    assert pinned["c"].left.is_pinned()
    assert isinstance(pinned["c"], Pair)
    assert isinstance(pinned["d"], Encoding)
    assert pinned["d"]["e"].is_pinned()
    assert pinned["b"][1][1] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [list, Stream])
def test_a_loader_pins_where_there_is_an_accelerator(workers: int, source: Any) -> None:
    if not wants_pinning(True):
        pytest.skip("no accelerator with its own memory")
    samples = source([{"x": torch.ones(2)} for _ in range(4)])
    for pinned in (True, False):
        loader = train_loader(samples, 2, collate=None, workers=workers, pin_memory=pinned)
        assert [group.batches[0]["x"].is_pinned() for group in loader.groups()] == [pinned] * 2


def test_without_an_accelerator_nothing_is_pinned() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert not wants_pinning(True)
    batch = next(iter(train_loader([{"x": torch.ones(2)}] * 4, 2, collate=None, pin_memory=True)))
    assert not batch["x"].is_pinned()
