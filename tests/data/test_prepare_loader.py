"""Loaders of user loops: every sample once, the same batches over all ranks whatever their number and the workers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data import prepared_ranks
from tests.data.cases import Augmented, Numbers
from tests.dist.launch import on_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.errors import DataError
from windlass.data.prepare_loader import prepare_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.dist.gang import Gang

Make = Any


def prepare(loader: DataLoader[Any], world: int = 1, rank: int = 0, **options: Any) -> PreparedLoader:
    torch.manual_seed(5)
    return prepare_loader(
        loader,
        ranks=world,
        rank=rank,
        device=None,
        options=DataLoaderConfiguration(**options),
        data_ranks=Gang(),
    )


def ranks(make: Make, world: int, **options: Any) -> list[PreparedLoader]:
    """Every rank's loader; `make` gives the user's, a fresh one for each process."""
    return [prepare(make(), world, rank, **options) for rank in range(world)]


def steps(loaders: list[PreparedLoader]) -> list[list[list[int]]]:
    """One pass: for each batch, the samples of every rank, fillers left out."""
    seen = []
    for batches in zip(*loaders, strict=True):
        assert len({loader.shares for loader in loaders}) == 1, "ranks agree on everybody's share"
        assert len({loader.end_of_dataloader for loader in loaders}) == 1
        for loader, batch in zip(loaders, batches, strict=True):
            assert loader.is_filler or len(batch) == loader.samples_here
        seen.append([[] if m.is_filler else b.tolist() for m, b in zip(loaders, batches, strict=True)])
    assert all(loader.end_of_dataloader for loader in loaders)
    return seen


def together(seen: list[list[list[int]]]) -> list[list[int]]:
    return [[i for part in parts for i in part] for parts in seen]


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 7),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    split=st.booleans(),
)
def test_every_sample_once_and_the_same_batches_on_any_number_of_ranks(
    count: int, batch: int, world: int, shuffle: bool, split: bool
) -> None:
    def make(size: int) -> Any:
        return lambda: DataLoader(Numbers(count), batch_size=size, shuffle=shuffle)

    total = batch if split else batch * world
    alone = ranks(make(total), 1)
    shared = ranks(make(batch), world, split_batches=split)
    assert [len(loader) for loader in shared] == [-(-count // total)] * world
    for _ in range(2):
        expected, seen = together(steps(alone)), together(steps(shared))
        assert seen == expected
        assert sorted(i for step in seen for i in step) == list(range(count))


@pytest.mark.parametrize("world", [2, 3])
def test_workers_change_nothing(world: int) -> None:
    def passes(workers: int) -> list[Any]:
        def make() -> Any:
            return DataLoader(Augmented(23), batch_size=3, shuffle=True, num_workers=workers)

        loaders = ranks(make, world)
        return [[loader.state_dict(), batch["x"]] for _ in range(2) for loader in loaders for batch in loader]

    for (state, batch), (other_state, other) in zip(passes(0), passes(2), strict=True):
        assert state == other_state
        assert torch.equal(batch, other)


def test_generators_of_the_program_are_left_alone() -> None:
    loader = prepare(DataLoader(Augmented(9), batch_size=2, shuffle=True))
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_decides_the_order_and_every_pass_has_its_own() -> None:
    def order(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = DataLoader(Numbers(30), batch_size=30, shuffle=True)
        prepared = prepare_loader(
            loader, ranks=1, rank=0, device=None, options=DataLoaderConfiguration(), data_ranks=Gang()
        )
        return [next(iter(prepared)).tolist(), *(batch.tolist() for batch in prepared)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    loader = prepare(DataLoader(Numbers(30), batch_size=10, shuffle=True), data_seed=3)
    first, second = (next(batch.tolist() for batch in whole) for whole in (list(loader), list(loader)))
    assert first != second
    loader.set_epoch(0)
    assert next(iter(loader)).tolist() == first
    assert next(iter(loader)).tolist() == first, "a pass that was left early begins again"


def test_a_generator_of_the_sampler_gives_the_order_that_torch_gives() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        return DataLoader(Numbers(17), batch_size=17, sampler=RandomSampler(range(17), generator=generator))

    assert next(iter(prepare(make()))).tolist() == next(iter(make())).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_custom_samplers_are_honoured(world: int) -> None:
    weights = [float(i % 3) for i in range(20)]

    def make(size: int) -> Any:
        return lambda: DataLoader(
            Numbers(20), batch_size=size, sampler=WeightedRandomSampler(weights, num_samples=14)
        )

    seen = together(steps(ranks(make(2), world)))
    assert seen == together(steps(ranks(make(2 * world), 1)))
    assert len([i for step in seen for i in step]) == 14
    assert not any(i % 3 == 0 for step in seen for i in step)


class Bucketed:
    """Batches of differing sizes."""

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]])

    def __len__(self) -> int:
        return 5


def test_custom_batch_samplers_keep_their_batches() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(11), batch_sampler=Bucketed())

    assert steps(ranks(make, 2)) == [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8, 9]], [[10], []]]
    assert steps(ranks(make, 2, split_batches=True)) == [
        [[0, 1], [2]],
        [[3], []],
        [[4], [5]],
        [[6, 7], [8, 9]],
        [[10], []],
    ]
    loader = prepare(make())
    assert (loader.total_batch_size, loader.batch_size, type(loader.batch_sampler)) == (None, None, Bucketed)


def test_a_batch_sampler_over_a_seeded_sampler_is_the_same_on_every_rank() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(
            Numbers(13), batch_sampler=type("Own", (BatchSampler,), {})(
                RandomSampler(range(13), generator=generator), 2, False
            )
        )  # fmt: skip

    loaders = ranks(make, 3)
    first, second = (together(steps(loaders)) for _ in range(2))
    assert first != second
    assert sorted(i for step in first for i in step) == list(range(13))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_last_drops_what_is_no_whole_batch_of_all_ranks(world: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(20), batch_size=3, drop_last=True)

    loaders = ranks(make, world)
    seen = steps(loaders)
    assert len(seen) == len(loaders[0]) == 20 // (3 * world)
    assert all(len(part) == 3 for parts in seen for part in parts)
    assert loaders[0].remainder == -1


def test_what_a_loader_says_of_itself() -> None:
    loader = prepare(DataLoader(Numbers(22), batch_size=4), 2, 1)
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (4, 8, 22)
    assert loader.remainder == 6
    batches = iter(loader)
    next(batches)
    assert (loader.end_of_dataloader, loader.remainder) == (False, 6)
    *_, last = batches
    assert (loader.end_of_dataloader, loader.remainder, loader.shares) == (True, 6, (3, 3))
    assert last.tolist() == [19, 20, 21]
    assert prepare(loader) is loader


def test_batches_are_put_on_the_device_with_their_containers() -> None:
    loader = DataLoader(Augmented(4), batch_size=2)
    meta = torch.device("meta")
    prepared = prepare_loader(
        loader, ranks=1, rank=0, device=meta, options=DataLoaderConfiguration(), data_ranks=Gang()
    )
    assert all(batch["x"].device == meta for batch in prepared)


def test_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="list is not a torch"):
        prepare([1, 2])  # type: ignore[arg-type]


@pytest.mark.dist
def test_ranks_that_must_speak_to_each_other() -> None:
    on_ranks(3, prepared_ranks.main)


class WhoReads(Numbers):
    """Samples say in which worker they were read, and what its `worker_init_fn` left there."""

    mark = 0

    def __getitem__(self, index: int) -> list[int]:
        info = torch.utils.data.get_worker_info()
        return [index, -1 if info is None else info.id, info.dataset._fetch._dataset.mark if info else -1]


def _mark(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset._fetch._dataset.mark = 10 + worker  # type: ignore[union-attr]


def test_options_of_workers_are_honoured() -> None:
    loader = prepare(
        DataLoader(
            WhoReads(8),
            batch_size=2,
            num_workers=2,
            worker_init_fn=_mark,
            persistent_workers=True,
            timeout=90,
        )
    )
    assert (loader.num_workers, loader.persistent_workers, loader.timeout) == (2, True, 90)
    for _ in range(2):
        rows = [[int(column[0]) for column in batch] for batch in loader]
        assert rows == [[0, 0, 10], [2, 1, 11], [4, 0, 10], [6, 1, 11]]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_passes_at_once(workers: int) -> None:
    loader = prepare(DataLoader(Numbers(9), batch_size=2, num_workers=workers))
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert [one for one, _ in pairs] == [other for _, other in pairs]
    assert [i for one, _ in pairs for i in one] == list(range(9))


class Follower:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, loader: PreparedLoader) -> None:
        self.heard.append(f"begin {loader.iteration}")

    def turn_to(self, loader: PreparedLoader) -> None:
        self.heard.append("batch")

    def end(self, loader: PreparedLoader) -> None:
        self.heard.append(f"end {loader.end_of_dataloader}")


def test_a_follower_hears_of_passes_also_of_those_left_early() -> None:
    loader = prepare(DataLoader(Numbers(4), batch_size=2))
    loader.follower = follower = Follower()
    for _ in loader:
        break
    list(loader)
    list(loader.skipping(1))
    left, whole = ["begin 0", "batch", "end False"], ["begin 0", "batch", "batch", "end True"]
    assert follower.heard == [*left, *whole, "begin 1", "batch", "end True"]


def test_datasets_and_samplers_hear_of_the_epoch() -> None:
    class Epochs(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> int:
            return 10 * self.epoch + index

    loader = prepare(DataLoader(Epochs(2), batch_size=2))
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1], [10, 11]]
    loader.set_epoch(7)
    assert next(iter(loader)).tolist() == [70, 71]
    unbatched = prepare(DataLoader(Epochs(2), batch_size=None))
    assert [int(item) for _ in range(2) for item in unbatched] == [0, 1, 10, 11]


def test_an_error_of_an_unbatched_dataset_names_the_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            return index if index < 2 else 1 // 0

    with pytest.raises(ZeroDivisionError) as raised:
        list(prepare(DataLoader(Broken(3), batch_size=None)))
    assert raised.value.__notes__ == ["raised while reading sample 2 of Broken"]
