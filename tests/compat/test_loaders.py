"""The loader classes of accelerate that scripts construct: the same batches as accelerate's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import accelerate.data_loader as peers
import pytest
import torch
from tests.data.cases import Numbers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from windlass import Accelerator, data_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
)
from windlass.state import GradientState


def seen(loader: Any) -> list[Any]:
    return [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]


@pytest.mark.parametrize("name", ["DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"])
@pytest.mark.parametrize("options", [{}, {"skip_batches": 2}, {"drop_last": True}], ids=str)
def test_a_constructed_loader_returns_the_batches_of_accelerate(name: str, options: dict[str, Any]) -> None:
    ours, theirs = (
        getattr(module, name)(Numbers(14), batch_size=4, **options) for module in (data_loader, peers)
    )
    for _ in range(2):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    if name == "SkipDataLoader":
        assert len(ours) == len(theirs)
    assert ours.total_batch_size == 4
    assert ours.total_dataset_length == 14


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [7, 8, 10, 13])
@pytest.mark.parametrize("split", [False, True])
def test_rows_that_were_dealt_once_all_count(drop_last: bool, samples: int, split: bool) -> None:
    """The sampler has fewer or more samples than the dataset, or its last, short batch is left out."""
    positions, counted = [index % 10 for index in range(samples)], []
    for rank in range(2):
        batches = BatchSampler(positions, 4 if split else 2, drop_last)
        loader = DataLoaderShard(Numbers(10), batch_sampler=BatchSamplerShard(batches, 2, rank, split))
        counted.append([batch.tolist()[: loader.samples_here] for batch in loader])
    whole = samples - samples % 4 if drop_last else samples
    dealt = [number for row in zip(*counted, strict=True) for part in row for number in part]
    assert dealt == positions[:whole]


def test_the_end_of_a_pass_is_known_at_its_last_batch() -> None:
    loader = DataLoaderShard(Numbers(14), batch_size=4)
    assert [end for _, end, _ in seen(loader)] == [False, False, False, True]
    assert [end for _, end, _ in seen(loader)] == [False, False, False, True]
    assert loader.remainder == 2
    assert loader.iteration == 2


def test_what_prepare_returns_is_an_instance_and_a_constructed_loader_is_one_of_its_class_alone() -> None:
    prepared = Accelerator(cpu=True).prepare(DataLoader(Numbers(4)))
    assert type(prepared) is PreparedLoader
    assert isinstance(prepared, DataLoaderShard)
    assert isinstance(prepared, DataLoaderDispatcher)
    assert not isinstance(DataLoaderShard(Numbers(4)), SkipDataLoader)
    assert not isinstance(DataLoader(Numbers(4)), DataLoaderShard)


def test_preparing_a_constructed_loader_keeps_what_it_skips() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(SkipDataLoader(Numbers(12), batch_size=4, skip_batches=1))
    assert type(prepared) is PreparedLoader
    assert [batch.tolist() for batch in prepared] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("split", [False, True])
def test_a_shard_knows_which_samples_it_repeats(split: bool) -> None:
    shares = []
    for rank in range(2):
        inner = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
        sampler = BatchSamplerShard(inner, 2, rank, split_batches=split)
        loader = DataLoaderShard(Numbers(10), batch_sampler=sampler)
        theirs = peers.BatchSamplerShard(inner, 2, rank, split_batches=split)
        peer = peers.DataLoaderShard(Numbers(10), batch_sampler=theirs)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in peer]
        assert (loader.total_batch_size, loader.remainder) == (
            peer.total_batch_size,
            10 % (4 if split else 8),
        )
        assert loader.is_dealt
        shares.append([loader.samples_here for _ in loader])
    assert sum(map(sum, shares)) == 10


def test_a_loop_accumulates_up_to_the_end_of_a_constructed_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in DataLoaderShard(Numbers(12), batch_size=4):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float()[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.updates == 2
    assert not accelerator.gradient_state.in_dataloader


def test_a_script_may_write_a_loader_with_the_mixin() -> None:
    class Own(DataLoader[Any], DataLoaderStateMixin):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.gradient_state, self._drop_last = GradientState(), False
            self.total_batch_size = self.batch_size

        def __iter__(self) -> Any:
            self.begin()
            for number, batch in enumerate(super().__iter__()):
                self.end_of_dataloader = number == len(self) - 1
                yield batch
            self.end()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader, gathered = Own(Numbers(10), batch_size=4), []
    for batch in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        with accelerator.accumulate():
            gathered.append(accelerator.gather_for_metrics(batch).tolist())
            assert accelerator.sync_gradients == (len(gathered) == 3)
    assert gathered[-1] == [8, 9]
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_a_constructed_loader_can_be_copied(copied: Any) -> None:
    for loader in (SkipDataLoader(Numbers(8), batch_size=2, skip_batches=1), DataLoaderShard(Numbers(8))):
        other = copied(loader)
        assert type(other) is type(loader)
        assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


def test_skipping_in_a_batch_sampler() -> None:
    inner = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    ours, theirs = SkipBatchSampler(inner, 1), peers.SkipBatchSampler(inner, 1)
    assert list(ours) == list(theirs)
    assert (len(ours), ours.total_length) == (len(theirs), theirs.total_length)


@pytest.mark.parametrize("batch", [2, 3])
def test_the_parts_of_all_processes_are_those_of_accelerate(batch: int) -> None:
    for split in (False, True):
        if split and batch % 2:
            continue
        for rank in range(2):
            rows = DataLoader(list(range(12)), batch_size=batch)
            options: Any = {"num_processes": 2, "process_index": rank, "split_batches": split}
            ours = prepare_data_loader(rows, **options)
            expected = peers.prepare_data_loader(rows, **options)
            assert [part.tolist() for part in ours] == [part.tolist() for part in expected]
