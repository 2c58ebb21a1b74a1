"""Loaders of every kind in one process: they give what torch's own loader gives, and what they cannot is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.data.cases import Numbers, Stream
from tests.data.test_prepare_loader import prepare
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from windlass.core.errors import ConfigError, DataError


class Columns:
    """Takes lists of positions."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, ids: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(ids), "names": [f"row {i}" for i in ids]}


class Ready(IterableDataset[Any]):
    """Gives batches."""

    def __iter__(self) -> Any:
        return iter([torch.arange(3), torch.arange(5), torch.arange(1)])


class Fixed(DataLoader[Any]):
    """Iterates in its own way."""

    def __iter__(self) -> Any:
        return iter([torch.tensor([5, 6]), torch.tensor([7])])

    def __len__(self) -> int:
        return 2


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        while True:
            yield 0


def by_columns() -> DataLoader[Any]:
    return DataLoader(
        Columns(), sampler=BatchSampler(SequentialSampler(range(7)), 3, drop_last=False), batch_size=None
    )  # type: ignore[arg-type]


KINDS = {
    "map": lambda: DataLoader(Numbers(7), batch_size=3),
    "workers": lambda: DataLoader(Numbers(7), batch_size=3, num_workers=1),
    "empty": lambda: DataLoader(Numbers(0), batch_size=3),
    "batch sampler": lambda: DataLoader(Numbers(7), batch_sampler=[[1, 2], [5], [0]]),
    "columns": by_columns,
    "unbatched": lambda: DataLoader([torch.arange(2), torch.arange(4)], batch_size=None),
    "stream": lambda: DataLoader(Stream(Numbers(7)), batch_size=3),
    "stream, dropping": lambda: DataLoader(Stream(Numbers(7)), batch_size=3, drop_last=True),
    "empty stream": lambda: DataLoader(Stream(Numbers(0)), batch_size=3),
    "unbatched stream": lambda: DataLoader(Ready(), batch_size=None),
    "own iteration": lambda: Fixed(Numbers(3)),
}


def plain(batches: Any) -> list[Any]:
    return [{k: _listed(v) for k, v in b.items()} if isinstance(b, dict) else _listed(b) for b in batches]


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dispatch", [None, True])
def test_one_process_gets_what_torch_gives(kind: str, dispatch: bool | None) -> None:
    loader = prepare(KINDS[kind](), dispatch_batches=dispatch)
    for _ in range(2):
        assert plain(loader) == plain(KINDS[kind]())
    assert loader.iteration == 2
    if plain(loader):
        assert loader.end_of_dataloader
        assert loader.samples_here == loader.samples_everywhere > 0
    try:
        expected = len(KINDS[kind]())
    except TypeError:
        expected = None
    if expected is None:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
    else:
        assert len(loader) == expected


@pytest.mark.parametrize("world", [2, 3])
def test_columns_are_dealt_in_batches(world: int) -> None:
    loaders = [prepare(by_columns(), world, rank) for rank in range(world)]
    rows = [i for loader in loaders for batch in loader if not loader.is_filler for i in batch["x"].tolist()]
    assert sorted(rows) == list(range(7))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="split_batches=True: the loader has no batch size"):
        prepare(DataLoader([1, 2], batch_size=None), split_batches=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Fixed has an __iter__ of its own"):
        prepare(Fixed(Numbers(3)), 2, 0)


def test_samplers_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.data.order._ENDLESS", 1000)
    with pytest.raises(DataError, match="Endless gave 1000 positions and did not end"):
        len(prepare(DataLoader(Numbers(3), sampler=Endless())))
    with pytest.raises(DataError, match="must yield lists of positions"):
        list(prepare(DataLoader(Numbers(3), batch_sampler=[[0], []])))


def test_a_one_shot_stream_says_so_in_its_second_pass() -> None:
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self._samples = iter(range(3))

        def __iter__(self) -> Any:
            return self._samples

    loader = prepare(DataLoader(Once(), batch_size=2))
    assert len(list(loader)) == 2
    with pytest.raises(DataError, match="no sample in epoch 1"):
        list(loader)
