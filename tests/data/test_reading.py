from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import Counted, Stream, in_global_order, train_loader

from windlass.checkpoint.codec import decode, encode
from windlass.data.loader import Loader

COUNT = 48
SHARD = COUNT // 8
read: list[int] = []


def rows_of(shards: list[int]) -> Any:
    for shard in shards:
        for i in range(shard, COUNT, 8):
            read.append(i)
            yield {"i": i}


def base() -> Any:
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(8))})


def with_noise(example: dict[str, Any]) -> dict[str, Any]:
    return example | {"noise": torch.rand(()).item() + random.random()}


def tripled(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"i": [i for i in examples["i"] for _ in range(3)]}


def interleaved() -> Any:
    return datasets.interleave_datasets([base(), base()], probabilities=[0.4, 0.6], seed=3)


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": base,
    "map": lambda: base().map(with_noise),
    "batched map and filter": lambda: (
        base().map(tripled, batched=True, batch_size=5).filter(lambda row: row["i"] % 2 == 0).map(with_noise)
    ),
    "skip and take": lambda: base().skip(3).take(40).map(with_noise),
    "interleave": lambda: interleaved().map(with_noise),
    "arrow": lambda: datasets.Dataset.from_dict({"i": list(range(COUNT))}).to_iterable_dataset(num_shards=3),
    "shards in another order each epoch": lambda: base().shuffle(seed=5, buffer_size=1),
    "own state": lambda: Counted(COUNT),
}
WITHOUT_STATE: dict[str, Callable[[], Any]] = {
    "shuffle buffer": lambda: base().shuffle(seed=5, buffer_size=16),
    "random batches": lambda: base().map(
        lambda rows: {"x": torch.rand(len(rows["i"])).tolist()}, batched=True, batch_size=8
    ),
    "no state": lambda: Stream(range(COUNT)),
}


def as_saved(state: Any) -> Any:
    """Through the codec and JSON, as a checkpoint takes it."""
    tree, tensors = encode(state)
    return decode(json.loads(json.dumps(tree)), tensors)


def groups_of(ranks: list[Loader], accumulation: int, limit: int | None = None) -> list[tuple[Any, Any]]:
    """(ids, samples) of each update over all ranks, up to `limit` of them or to the end of the epoch."""
    iterators = [loader.groups(accumulation) for loader in ranks]
    updates: list[tuple[Any, Any]] = []
    for groups in zip(*iterators, strict=True):
        size = max(len(g.ids) for g in groups)
        samples = [
            s for j in range(size) for g in groups if j < len(g.ids) and g.ids[j] for s in g.batches[j]
        ]
        updates.append((in_global_order(list(groups)), samples))
        if len(updates) == limit:
            break
    return updates


def loaders(name: str, micro: int, accumulation: int, world: int, **plan: Any) -> list[Loader]:
    make = (STREAMS | WITHOUT_STATE)[name]
    return [train_loader(make(), micro, accumulation, world, rank, **plan) for rank in range(world)]


@pytest.mark.parametrize("name", [*STREAMS, *WITHOUT_STATE])
def test_any_world_and_any_workers_go_on_with_the_very_next_sample(name: str) -> None:
    """1 -> 2 -> 1 -> 3 ranks at arbitrary updates, with another batch size each; resumed twice; into a second epoch."""
    (alone,) = loaders(name, 6, 1, 1)
    expected = [update for _ in range(2) for update in groups_of([alone], 1)]
    seen: list[Any] = []
    state: Any = None
    plan = [
        (1, 6, 1, 0, 2),
        (2, 3, 1, 0, 1),
        (1, 2, 3, 2, 2),
        (3, 1, 2, 0, None),
        (2, 1, 3, 2, 1),
        (1, 6, 1, 0, None),
    ]
    for world, micro, accumulation, workers, updates in plan:
        ranks = loaders(name, micro, accumulation, world, workers=workers)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(as_saved(state))
        seen += groups_of(ranks, accumulation, updates)
        state = ranks[-1].state_dict()
    assert seen == expected


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("stop", [1, 4])
def test_no_sample_before_the_position_is_read(name: str, stop: int, said: pytest.LogCaptureFixture) -> None:
    (whole,) = loaders(name, 6, 1, 1)
    groups_of([whole], 1, stop)
    state = as_saved(whole.state_dict())
    assert state["bookmark"]["state"] is not None
    (resumed,) = loaders(name, 6, 1, 1)
    resumed.load_state_dict(state)
    read.clear()
    rest = [i for ids, _ in groups_of([resumed], 1) for i in ids]
    assert "again" not in said.text
    # A filter drops every second one, an interleaving reads two streams, and a shard that is a generator is read from
    # its own beginning.
    assert len(read) <= 2 * len(rest) + 2 * SHARD
    if name in ("plain", "own state"):
        assert len(read) <= len(rest) + SHARD


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shuffle buffer", "shuffles through a buffer"),
        ("random batches", "did not lead back to its place"),
        ("no state", "has no state_dict"),
    ],
)
def test_what_cannot_be_entered_exactly_is_read_again_and_that_is_said(
    name: str, reason: str, said: pytest.LogCaptureFixture
) -> None:
    (whole,) = loaders(name, 3, 1, 1)
    expected = groups_of([whole], 1)
    (first,) = loaders(name, 3, 1, 1)
    groups_of([first], 1, 5)
    (resumed,) = loaders(name, 3, 1, 1)
    resumed.load_state_dict(as_saved(first.state_dict()))
    assert groups_of([resumed], 1) == expected[5:]
    assert said.text.count("reading 15 samples of the stream again") == 1
    assert reason in said.text


@given(stops=st.lists(st.integers(1, 5), min_size=1, max_size=4), size=st.integers(1, 5))
def test_a_chain_of_resumes_reads_every_sample_once(stops: list[int], size: int) -> None:
    seen: list[int] = []
    loader = train_loader(Counted(COUNT), size)
    for stop in [*stops, None]:
        state = as_saved(loader.state_dict())
        loader = train_loader(Counted(COUNT), size)
        loader.load_state_dict(state)
        seen += [i for ids, _ in groups_of([loader], 1, stop) for i in ids]
        assert stop is None or loader.dataset.given <= (stop + 1) * size + 4
    assert len(seen) >= COUNT
    assert seen == ([*range(COUNT)] * 3)[: len(seen)]


def test_another_stream_is_noticed(said: pytest.LogCaptureFixture) -> None:
    first = train_loader(Stream(range(40)), 4)
    groups_of([first], 1, 3)
    resumed = train_loader(Stream(range(100, 140)), 4)
    resumed.load_state_dict(first.state_dict())
    groups_of([resumed], 1)
    assert "after sample 12, Stream returns other samples" in said.text


def test_a_state_that_checkpoints_cannot_hold_is_named(said: pytest.LogCaptureFixture) -> None:
    class Odd(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "lock": {"x": object()}}

    first = train_loader(Odd(COUNT), 4)
    groups_of([first], 1, 2)
    resumed = train_loader(Odd(COUNT), 4)
    resumed.load_state_dict(as_saved(first.state_dict()))
    assert [ids for ids, _ in groups_of([resumed], 1, 1)] == [[8, 9, 10, 11]]
    assert "'lock.x' is a builtins.object" in said.text


def test_a_dataset_that_goes_on_changing_its_state_does_not_change_the_bookmark() -> None:
    class Live(Counted):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.live = {"at": 0}

        def state_dict(self) -> dict[str, Any]:
            self.live["at"] = self.at
            return self.live

    loader = train_loader(Live(COUNT), 4)
    positions = [group.position for group in loader.groups()]
    assert [p["bookmark"]["state"]["at"] for p in positions[:-1]] == list(range(4, COUNT, 4))


def test_a_large_state_is_taken_at_some_rows_only() -> None:
    class Large(Counted):
        taken = 0

        def state_dict(self) -> dict[str, Any]:
            self.taken += 1
            return {"at": self.at, "buffer": list(range(2000))}

    dataset = Large(COUNT)
    first = train_loader(dataset, 2)
    groups_of([first], 1, 13)
    assert dataset.taken < 4
    state = as_saved(first.state_dict())
    resumed = train_loader(Large(COUNT), 2)
    resumed.load_state_dict(state)
    assert [i for ids, _ in groups_of([resumed], 1) for i in ids] == list(range(26, COUNT))
    assert resumed.dataset.given <= COUNT - 26 + 2 * 8 + 4


def test_a_bookmark_survives_a_look_at_streams_that_share_their_nodes() -> None:
    """`skip` and `take` of one stream hold the same nodes, whose state a pass over either moves."""
    stream = base()
    train, held_out = stream.skip(8), stream.take(8)
    loader = train_loader(train, 4)
    groups = loader.groups()
    [next(groups) for _ in range(2)]
    assert len(list(train_loader(held_out, 4))) == 2
    [next(groups) for _ in range(3)]  # the first of them was read before that look
    resumed = train_loader(base().skip(8), 4)
    resumed.load_state_dict(as_saved(loader.state_dict()))
    read.clear()
    assert groups_of([resumed], 1)[0][0] == [20, 21, 22, 23]
    assert len(read) <= COUNT - 8 - 20 + SHARD


class Staged(torch.utils.data.IterableDataset[Any]):
    """Samples of the present epoch. `__iter__` draws before the first one, so a pass that is entered in the middle
    draws other numbers; its state is where it is, not where it began.
    """

    epoch, at, start = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        random.random()
        for i in range(start, 20):
            self.at = i + 1
            yield i, self.epoch, random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


@given(size=st.integers(1, 4), steps=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=6))
def test_one_stream_may_be_resumed_again_and_evaluated_in_between(
    size: int, steps: list[tuple[int, bool]]
) -> None:
    """As in a notebook, where a run is stopped and resumed with the same objects."""
    dataset, found, state = Staged(), list[Any](), None
    for stop, evaluates in [*steps, (99, False)]:
        loader = train_loader(dataset, size)
        if state is not None:
            loader.load_state_dict(as_saved(state))
        for _, group in zip(range(stop), loader.groups(), strict=False):
            found += group.batches
            state = group.position
            if evaluates:
                list(loader)
    expected = [batch for epoch in range(8) for batch in epoch_of(epoch, size)]
    assert found == expected[: len(found)]


def epoch_of(epoch: int, size: int) -> list[Any]:
    loader = train_loader(Staged(), size)
    loader.set_epoch(epoch)
    return [batch for group in loader.groups() for batch in group.batches]
