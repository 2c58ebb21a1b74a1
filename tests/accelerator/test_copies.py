"""Copies of what `prepare` returns (optimizer.py, prepared_schedule.py, data/prepared_loader.py) work by themselves."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from tests.accelerator.asking_dataset import Asking, Waiting, facts_of
from tests.data.cases import Numbers, Stream
from tests.dist.launch import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import windlass
from windlass import Accelerator
from windlass.config.loop_options import DataLoaderConfiguration
from windlass.data_loader import DataLoaderDispatcher, SkipDataLoader
from windlass.optim.public import get_linear_schedule_with_warmup
from windlass.state import AcceleratorState, PartialState

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda item: pickle.loads(pickle.dumps(item))}
copied_in_each_way = pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)


def prepared(**options: Any) -> tuple[Any, ...]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 8)
    return Accelerator(cpu=True, **options).prepare(model, optimizer, schedule)


def train(optimizer: Any, schedule: Any) -> list[float]:
    rates = []
    for step in range(3):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates


@copied_in_each_way
def test_an_optimizer_and_its_schedule(copied: Any) -> None:
    model, optimizer, schedule = prepared()
    train(optimizer, schedule)
    others, theirs = copied([optimizer, schedule]), model.weight.clone()
    assert others[1].optimizers[0] is others[0]
    assert others[1].scheduler.optimizer is others[0].optimizer is not optimizer.optimizer
    rates = train(*others)
    assert torch.equal(model.weight, theirs), "the copy has parameters of its own"
    assert train(optimizer, schedule) == rates
    assert torch.equal(others[0].param_groups[0]["params"][0], model.weight)
    assert others[0].updates == optimizer.updates == 6


@copied_in_each_way
def test_a_copied_optimizer_follows_no_loop(copied: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = copied(optimizer)
    with accelerator.accumulate(model):
        other.param_groups[0]["params"][1].grad = torch.ones(1)
        other.step()
        optimizer.step()
    assert (other.updates, optimizer.updates) == (1, 0)
    accelerator.free_memory()
    other.step()


def test_a_shallow_copy_of_an_optimizer_updates_the_same_parameters() -> None:
    model, optimizer, schedule = prepared()
    schedule.step()  # the rate of the first update is 0
    before, other = model.bias.clone(), copy.copy(optimizer)
    model.bias.grad = torch.ones(1)
    other.step()
    assert not torch.equal(model.bias, before)
    optimizer.step()


LOADERS: dict[str, Any] = {
    "map": lambda: DataLoader(Numbers(11), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(Numbers(11), batch_size=2, num_workers=1, persistent_workers=True),
    "unbatched": lambda: DataLoader(Numbers(5), batch_size=None),
    "sampled": lambda: DataLoader(
        Numbers(11), batch_sampler=BatchSampler(RandomSampler(range(11)), 3, False)
    ),
    "stream": lambda: DataLoader(Stream(Numbers(11)), batch_size=2),
}


@copied_in_each_way
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader(make: Any, copied: Any) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make())
    list(loader)
    other = copied(loader)
    accelerator.free_memory()
    passes = [[torch.as_tensor(batch).tolist() for batch in other] for _ in range(2)]
    assert accelerator.gradient_state.active_dataloader is None
    assert [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(2)] == passes
    assert other.iteration == 3


class Epochs(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_epoch_reaches_a_batch_sampler_at_once() -> None:
    sampler = Epochs(range(8), 2, False)
    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(8), batch_sampler=sampler))
    loader.set_epoch(3)
    assert sampler.epoch == 3


@pytest.mark.dist
def test_copies_of_loaders_on_two_ranks() -> None:
    on_ranks(2, main)


@pytest.mark.dist
def test_spawned_workers_of_two_ranks_know_their_rank() -> None:
    on_ranks(2, ask_spawned_workers)


@copied_in_each_way
def test_the_state_of_a_process_is_copied_as_accelerates(copied: Any) -> None:
    peer = pytest.importorskip("accelerate")
    peer.state.GradientState._reset_state()  # weak references to loaders of earlier tests cannot be pickled
    states = []
    for module in (windlass, peer):
        accelerator = module.Accelerator(cpu=True)
        state = importlib.import_module(f"{module.__name__}.state")
        states.append([accelerator, state.PartialState(), state.AcceleratorState(), state.GradientState()])
    ours, theirs = (copied(found) for found in states)
    for mine, other in zip(ours, theirs, strict=True):
        assert facts_of(other).items() <= facts_of(mine).items()
    assert [facts_of(state) for state in ours] == [facts_of(state) for state in states[0]]
    assert ours[3].sync_gradients is theirs[3].sync_gradients is True


# --- what each rank runs ----------------------------------------------------------------------------------------------


def values(loader: Any) -> list[Any]:
    return [(batch.tolist(), loader.samples_everywhere) for batch in loader]


def main() -> None:
    for dispatch in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for make in (DataLoader, SkipDataLoader):
            loader = accelerator.prepare(make(Numbers(10), batch_size=2))
            copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
            expected = values(loader)
            assert sum(count for _, count in expected) == 10
            assert all(values(other) == expected for other in copies)
    rank = accelerator.process_index
    assert [batch for batch, _ in values(DataLoaderDispatcher(Numbers(8), batch_size=2))] == [
        [2 * rank, 2 * rank + 1],
        [4 + 2 * rank, 5 + 2 * rank],
    ]


def spawned(dataset: Any) -> Any:
    return next(iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")))


def ask_spawned_workers() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    states = [accelerator, accelerator.state, PartialState(), AcceleratorState()]
    expected = facts_of(accelerator)
    assert (expected["num_processes"], expected["mixed_precision"]) == ("2", "bf16")
    # A spawned worker imports torch again: what does not differ between ranks is asked on one of them.
    for held in (states, states[2:3] if accelerator.is_main_process else states[3:]):
        found = spawned(Asking(held, (PartialState, AcceleratorState) if held is states else (PartialState,)))
        assert all(facts.items() <= expected.items() for facts in [*found["held"], *found["new"]]), found
    if accelerator.is_main_process:
        return
    error = spawned(Waiting(accelerator))
    assert error.startswith("DataError: a data worker of rank"), error
