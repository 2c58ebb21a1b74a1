from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.cases import Augmented, Numbers, SometimesAugmented, Stream, as_list, train_loader
from torch.utils.data import DataLoader

from windlass.config.plan import BatchPlan, DataPlan
from windlass.data.batch_reader import PassRequest
from windlass.data.choice import PassthroughReader
from windlass.data.collate_pad import auto_collate
from windlass.data.columns import ColumnCollator
from windlass.data.fetch import Fetch
from windlass.data.foreign_loader import ForeignLoader
from windlass.data.prepare import build_eval_loader


class MaskedCollator:
    """Like a masked-language-model collator with a seed: a generator of its own, made at first use."""

    def __init__(self, seed: int) -> None:
        self.seed, self.generator = seed, None

    def get_generator(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed)

    def __call__(self, samples: list[int]) -> float:
        return torch.rand((), generator=self.generator).item()


class WithHelper(MaskedCollator):
    def collate(self, samples: list[int]) -> float:
        return super().__call__(samples)

    __call__ = collate


@pytest.mark.parametrize(
    "wrap", [lambda c: c, lambda c: ColumnCollator(c, ["x"]), lambda c: WithHelper(c.seed)]
)
@pytest.mark.parametrize("source", [Numbers, lambda count: Stream(Numbers(count))])
def test_a_collators_own_generator_is_seeded_by_position(wrap: Any, source: Any) -> None:
    def noises(seed: int, consumed: int) -> list[float]:
        collate = wrap(MaskedCollator(seed))
        loader = train_loader(source(10), 2, order="sequential", collate=collate)
        loader.load_state_dict({"seed": 42, "epoch": 0, "consumed": consumed})
        return [group.batches[0] for group in loader.groups()]

    whole = noises(1, 0)
    assert noises(1, 4) == whole[2:]
    assert noises(2, 0) != whole
    assert len(set(whole)) == 5


def test_reading_costs_no_more_than_one_read_a_sample() -> None:
    for kind, reads in ((Numbers, 28), (Augmented, 28), (SometimesAugmented, 30)):
        dataset = kind(28)
        list(train_loader(dataset, 2, order="sequential", collate=None))
        assert dataset.reads <= reads, "only the batch in which the first draw is noticed is read twice"


DRAWS = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("where", ["reading", "collating"])
def test_a_single_late_draw_of_any_generator_is_noticed(draw: str, where: str) -> None:
    class Late(Numbers):
        def __getitem__(self, index: int) -> Any:
            return (index, DRAWS[draw]()) if where == "reading" and index == 7 else index

    def collate(samples: list[Any]) -> Any:
        return (samples, DRAWS[draw]()) if where == "collating" and samples == [7] else samples

    fetch = Fetch(Late(9), collate, seed=0)
    for index in range(7):
        fetch(0, [index])
    assert fetch(0, [7]) == Fetch(Late(9), collate, seed=0)(0, [7])


@pytest.mark.parametrize("kind", [Augmented, SometimesAugmented, Numbers])
def test_pythons_generator_is_put_back_where_asked(kind: Any) -> None:
    fetch = Fetch(kind(9), as_list, seed=0)
    for ids in ([0], [1, 2], [3], [4, 5, 6, 7, 8]):
        state = random.getstate()
        fetch(0, ids, True)
        assert random.getstate() == state


def test_the_programs_own_draws_change_nothing_and_are_not_changed(untouched_generators: None) -> None:
    fetch = Fetch(Augmented(9), auto_collate, seed=0)
    once = fetch(0, [1, 2])["x"]
    numpy_state, torch_state = np.random.get_state(), torch.get_rng_state()
    np.random.rand(3)
    torch.rand(3)
    random.random()
    assert torch.equal(fetch(0, [1, 2])["x"], once)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


def test_it_travels_to_a_spawned_worker() -> None:
    fetch = Fetch(SometimesAugmented(9), auto_collate, seed=0)
    copy = pickle.loads(pickle.dumps(fetch))
    assert torch.equal(fetch(1, [2, 3])["x"], copy(1, [2, 3])["x"])
    quiet = Fetch(SometimesAugmented(9), auto_collate, seed=0)
    quiet(1, [1])
    quiet(1, [2])
    assert torch.equal(fetch(1, [3])["x"], pickle.loads(pickle.dumps(quiet))(1, [3])["x"])


def test_an_error_in_collation_names_the_samples() -> None:
    with pytest.raises(ValueError, match="expected sequence") as caught:
        Fetch([{"x": [1]}, {"x": [1, 2]}], auto_collate, seed=0)(0, [0, 1])
    assert "collating the samples [0, 1]" in caught.value.__notes__[0]


def test_the_generators_are_put_back_after_an_error(untouched_generators: None) -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Fetch(Broken(3), as_list, seed=0)(0, [0])


PLAN = BatchPlan(micro=2, accumulation=1, ranks=1, rank=0, eval=2)


class Staged(Numbers):
    """Its samples are those of its epoch, as of a dataset that becomes harder from one to the next."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch


class Iterates(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def own(dataset: Any) -> Iterator[Any]:
    loader = train_loader(dataset, 2, order="sequential")
    loader.set_epoch(1)
    return (group.batches[0] for group in loader.groups())


def foreign(dataset: Any) -> Iterator[Any]:
    loader = ForeignLoader(DataLoader(dataset, batch_size=2), PLAN)
    loader.set_epoch(1)
    return (group.batches[0] for group in loader.groups())


def passed_on(dataset: Any) -> Iterator[Any]:
    return (dealt.batch for dealt in PassthroughReader(Iterates(dataset, batch_size=2)).read(PassRequest(1)))


@pytest.mark.parametrize("batches", [own, foreign, passed_on])
def test_a_pass_keeps_its_epoch_when_its_data_is_evaluated(batches: Callable[[Any], Iterator[Any]]) -> None:
    def read(evaluate: bool) -> list[Any]:
        dataset, found = Staged(8), []
        evaluation = build_eval_loader(dataset, plan=DataPlan(), batch=PLAN, collate=torch.tensor)
        for batch in batches(dataset):
            found.append([int(value) for value in batch])
            if evaluate:
                assert torch.cat(list(evaluation)).tolist() == list(range(8))
        return found

    assert read(evaluate=True) == read(evaluate=False) == [[100, 101], [102, 103], [104, 105], [106, 107]]
