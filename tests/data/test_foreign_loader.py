from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.cases import train_loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from windlass.config.plan import BatchPlan
from windlass.core.errors import DataError
from windlass.data.foreign_loader import ForeignLoader

PLAN = BatchPlan(micro=2, accumulation=2, ranks=1, rank=0, eval=2)


def shuffled(count: int = 11, generator: torch.Generator | None = None, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.arange(count)),
        batch_size=2,
        shuffle=True,
        generator=generator,
        num_workers=workers,
    )


def numbers(foreign: ForeignLoader, accumulation: int | None = None) -> list[list[int]]:
    return [[i for (x,) in group.batches for i in x.tolist()] for group in foreign.groups(accumulation)]


@given(count=st.integers(1, 30), accumulation=st.integers(1, 4))
def test_groups_hold_all_batches_and_the_last_says_so(count: int, accumulation: int) -> None:
    foreign = ForeignLoader([[i] for i in range(count)], PLAN)
    for epoch in range(2):
        groups = list(foreign.groups(accumulation))
        assert [batch for g in groups for batch in g.batches] == [[i] for i in range(count)]
        assert len(groups) == foreign.groups_per_epoch(accumulation)
        assert [g.last_in_epoch for g in groups] == [False] * (len(groups) - 1) + [True]
        assert {g.epoch for g in groups} == {epoch}
        assert all(g.dealt_samples == 0 and not any(g.ids) and len(g.ids) == len(g.batches) for g in groups)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_loader_repeats_its_order_on_resume(workers: int, untouched_generators: None) -> None:
    foreign = ForeignLoader(shuffled(workers=workers), PLAN)
    epochs = [numbers(foreign) for _ in range(2)]
    assert epochs[0] != epochs[1]
    resumed = ForeignLoader(shuffled(workers=workers), PLAN)
    resumed.load_state_dict({"seed": 42, "epoch": 1, "batches": 2, "loader": None})
    assert numbers(resumed) == epochs[1][1:]


def test_a_users_generator_gives_its_own_first_order_and_resumes(said: pytest.LogCaptureFixture) -> None:
    own = [x.tolist() for (x,) in shuffled(generator=torch.Generator().manual_seed(3))]
    foreign = ForeignLoader(shuffled(generator=torch.Generator().manual_seed(3)), PLAN)
    first, second = numbers(foreign, 1), numbers(foreign, 1)
    assert len(first) == len(own)
    resumed = ForeignLoader(shuffled(generator=torch.Generator().manual_seed(3)), PLAN)
    resumed.load_state_dict({"seed": 42, "epoch": 1, "batches": 4, "loader": None})
    assert numbers(resumed, 1) == second[4:]
    assert first == own
    assert "reading 4 batches of DataLoader again" in said.text


def test_a_second_run_with_the_same_loader_finds_the_seed_of_the_script() -> None:
    loader = shuffled(generator=torch.Generator().manual_seed(3))
    sampler = RandomSampler(range(11), generator=torch.Generator().manual_seed(3))

    def epochs() -> list[Any]:
        foreign, own = ForeignLoader(loader, PLAN), train_loader(range(11), 2, sampler=sampler)
        return [(numbers(foreign), numbers_of(own)) for _ in range(3)]

    def numbers_of(own: Any) -> list[Any]:
        return [group.ids for group in own.groups()]

    first = epochs()
    assert epochs() == first
    assert loader.generator is not None
    loader.generator.manual_seed(4)
    seeded = [x.tolist() for (x,) in shuffled(generator=torch.Generator().manual_seed(4))]
    assert numbers(ForeignLoader(loader, PLAN), 1) == seeded


def test_a_generator_within_a_batch_sampler_is_a_function_of_the_epoch() -> None:
    def loader() -> DataLoader[Any]:
        data = TensorDataset(torch.arange(11))
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False))

    foreign = ForeignLoader(loader(), PLAN)
    first, second = numbers(foreign, 1), numbers(foreign, 1)
    assert first == [x.tolist() for (x,) in loader()] != second
    resumed = ForeignLoader(loader(), PLAN)
    resumed.load_state_dict({"seed": 42, "epoch": 1, "batches": 0, "loader": None})
    assert numbers(resumed, 1) == second


class Counting:
    """A loader with a state of its own, such as StatefulDataLoader."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.given = count, 0, 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for i in range(start, self.count):
            self.given += 1
            self.at = i + 1
            yield i
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_is_not_read_again() -> None:
    groups = list(ForeignLoader(Counting(7), PLAN).groups())
    loader = Counting(7)
    resumed = ForeignLoader(loader, PLAN)
    resumed.load_state_dict(groups[1].position)
    assert [g.batches for g in resumed.groups()] == [g.batches for g in groups[2:]] == [[4, 5], [6]]
    assert loader.given == 3
    assert [g.batches for g in resumed.groups()] == [g.batches for g in groups]


def test_epochs_are_told() -> None:
    class Hearing(list):  # type: ignore[type-arg]
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = Hearing([1, 2])
    foreign = ForeignLoader(loader, PLAN)
    list(foreign.groups())
    list(foreign.groups())
    assert loader.epochs == [0, 1]


def test_a_batch_sampler_and_the_sampler_in_it_are_told_the_epoch() -> None:
    class Epochs(BatchSampler):
        def __init__(self, sampler: Any) -> None:
            super().__init__(sampler, 2, drop_last=False)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = TensorDataset(torch.arange(3))
    inner = DistributedSampler(data, num_replicas=1, rank=0)
    batches = Epochs(inner)
    foreign = ForeignLoader(DataLoader(data, batch_sampler=batches), PLAN)
    for _ in range(2):
        list(foreign.groups())
    assert batches.epochs == [0, 1]
    assert inner.epoch == 1


@pytest.mark.parametrize(("loader", "words"), [([], "is empty"), (3, "cannot be iterated")])
def test_what_gives_no_batch_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(ForeignLoader(loader, PLAN).groups())


def test_a_loader_of_the_length_0_is_refused_before_a_run_of_no_update() -> None:
    with pytest.raises(DataError, match="is empty"):
        ForeignLoader([], PLAN, longest=0)


def test_a_generator_serves_one_epoch_and_then_says_so() -> None:
    foreign = ForeignLoader((i for i in range(3)), PLAN)
    assert foreign.groups_per_epoch(2) is None
    assert len(list(foreign.groups())) == 2
    with pytest.raises(DataError, match=r"epoch 1.*once only"):
        list(foreign.groups())
