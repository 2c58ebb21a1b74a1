"""Resuming loaders that a user made: torchdata's by their own state, PyTorch's by their sampler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
import torchdata.nodes as nodes
from tests.data.cases import Augmented, Counted, Numbers, Stream
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from windlass.checkpoint.codec import decode, encode
from windlass.config.plan import BatchPlan
from windlass.core.trees import tensors_in
from windlass.data.foreign_loader import ForeignLoader

PLAN = BatchPlan(micro=2, accumulation=2, ranks=1, rank=0, eval=2)
COUNT = 26


def hub_stream() -> Any:
    """Gives another order in each epoch, and ignores a state of another epoch than the one it is in."""
    rows = datasets.Dataset.from_dict({"i": list(range(COUNT))}).to_iterable_dataset(num_shards=4)
    return rows.shuffle(seed=2, buffer_size=1)


def node_loader() -> Any:
    order = DistributedSampler(range(COUNT), num_replicas=1, rank=0)  # type: ignore[arg-type]
    batches = nodes.Batcher(nodes.SamplerWrapper(order), 2, drop_last=False)
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(batches, torch.tensor), 2))


LOADERS: dict[str, Callable[[], Any]] = {
    "stateful, shuffled": lambda: StatefulDataLoader(Numbers(COUNT), 2, shuffle=True),
    "stateful, shuffled, workers": lambda: StatefulDataLoader(Numbers(COUNT), 2, shuffle=True, num_workers=2),
    "stateful stream": lambda: StatefulDataLoader(hub_stream(), 2),
    "nodes": node_loader,
    "plain": lambda: DataLoader(Augmented(COUNT), 2, shuffle=True),
    "plain, own generator": lambda: DataLoader(
        Numbers(COUNT), 2, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "plain, batches of positions": lambda: DataLoader(
        Numbers(COUNT), batch_sampler=[[i, i + 1] for i in range(0, COUNT, 2)]
    ),
}
READ_AGAIN: dict[str, Callable[[], Any]] = {
    "plain, workers": lambda: DataLoader(Augmented(COUNT), 2, shuffle=True, num_workers=2),
    "plain stream": lambda: DataLoader(Stream(range(COUNT)), 2),
    # A worker's generator is not in this loader's state, so what follows is other noise.
    "stateful, random samples in workers": lambda: StatefulDataLoader(Augmented(COUNT), 2, num_workers=2),
}


def as_saved(state: Any) -> Any:
    tree, tensors = encode(state)
    return decode(json.loads(json.dumps(tree)), tensors)


def seeded(make: Callable[[], Any]) -> ForeignLoader:
    """As in a script that seeds its run: some loaders draw a seed when they are made."""
    torch.manual_seed(7)
    return ForeignLoader(make(), PLAN)


def told(loader: ForeignLoader) -> list[list[Any]]:
    """The numbers in each batch of each group."""
    return [[[x.tolist() for x in tensors_in(batch)] for batch in group.batches] for group in loader.groups()]


@pytest.mark.parametrize("name", [*LOADERS, *READ_AGAIN])
@pytest.mark.parametrize(("epoch", "stop"), [(0, 1), (1, 4)])
def test_it_continues_exactly(name: str, epoch: int, stop: int, said: pytest.LogCaptureFixture) -> None:
    make = (LOADERS | READ_AGAIN)[name]
    whole = seeded(make)
    expected = [told(whole) for _ in range(3)]
    first = seeded(make)
    for _ in range(epoch):
        told(first)
    groups = first.groups()
    [next(groups) for _ in range(stop)]
    resumed = seeded(make)
    resumed.load_state_dict(as_saved(first.state_dict()))
    assert told(resumed) == expected[epoch][stop:]
    assert told(resumed) == expected[epoch + 1]
    assert said.text.count("batches of") == (name in READ_AGAIN)


@pytest.mark.parametrize("name", [*LOADERS, *READ_AGAIN])
def test_it_continues_exactly_behind_the_last_update_of_an_epoch(name: str) -> None:
    make = (LOADERS | READ_AGAIN)[name]
    first = seeded(make)
    told(first)
    state = as_saved(first.state_dict())
    expected = [told(first), told(first)]
    resumed = seeded(make)
    resumed.load_state_dict(state)
    assert [told(resumed), told(resumed)] == expected


def test_no_sample_before_the_position_is_read() -> None:
    for make in (DataLoader, StatefulDataLoader):
        first = ForeignLoader(make(Numbers(COUNT), 2, shuffle=True), PLAN)
        groups = first.groups()
        [next(groups) for _ in range(5)]
        dataset = Numbers(COUNT)
        resumed = ForeignLoader(make(dataset, 2, shuffle=True), PLAN)
        resumed.load_state_dict(first.state_dict())
        told(resumed)
        assert dataset.reads == COUNT - 20


def test_another_accumulation_continues_the_order() -> None:
    whole = ForeignLoader(LOADERS["plain"](), PLAN)
    batches = [batch["x"].tolist() for group in whole.groups() for batch in group.batches]
    first = ForeignLoader(LOADERS["plain"](), PLAN)
    next(first.groups(4))
    resumed = ForeignLoader(LOADERS["plain"](), PLAN)
    resumed.load_state_dict(first.state_dict())
    assert [batch["x"].tolist() for group in resumed.groups(3) for batch in group.batches] == batches[4:]


def test_other_samples_are_noticed(said: pytest.LogCaptureFixture) -> None:
    first = ForeignLoader([torch.tensor([i]) for i in range(9)], PLAN)
    next(first.groups())
    resumed = ForeignLoader([torch.tensor([i + 50]) for i in range(9)], PLAN)
    resumed.load_state_dict(first.state_dict())
    list(resumed.groups())
    assert "after batch 2, list returns other batches" in said.text


def test_under_more_processes_each_goes_on_behind_its_share(said: pytest.LogCaptureFixture) -> None:
    first = ForeignLoader(Counted(COUNT), PLAN)
    groups = first.groups()
    [next(groups) for _ in range(3)]
    plan = dataclasses.replace(PLAN, ranks=2, rank=1)
    resumed = ForeignLoader(list(range(1, COUNT, 2)), plan)
    resumed.load_state_dict(first.state_dict())
    assert resumed.groups_left(first.state_dict(), 1) == COUNT // 2 - 3
    assert next(resumed.groups()).batches == [7, 9]
    assert "dealt its batches to 1 processes, and there are 2 now" in said.text


def test_a_state_that_checkpoints_cannot_hold_is_named(said: pytest.LogCaptureFixture) -> None:
    class Odd(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"open": {1, 2}}

    first = ForeignLoader(Odd(9), PLAN)
    next(first.groups())
    resumed = ForeignLoader(Odd(9), PLAN)
    resumed.load_state_dict(as_saved(first.state_dict()))
    assert next(resumed.groups()).batches == [2, 3]
    assert "its state cannot be saved: 'open' is a builtins.set" in said.text
