"""Run on ranks: loaders whose ranks must communicate while they read."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import pytest
import torch
from datasets import IterableDataset as HubStream
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, Sampler

from windlass.config.loop_options import DataLoaderConfiguration
from windlass.core.errors import ConfigError, DataError
from windlass.core.world import world_from_environment
from windlass.data.prepare_loader import prepare_loader
from windlass.data.prepared_loader import PreparedLoader
from windlass.dist.gang import Gang, join, leave

RANK, SIZE = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
CPU = torch.device("cpu")


class Count(IterableDataset[Any]):
    """0, 1, 2, ... of unknown length; notes how many were read."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __iter__(self) -> Any:
        for i in range(self.count):
            self.reads += 1
            yield i


class OwnPart(Count):
    """Splits itself by rank, which only its samples show."""

    def __iter__(self) -> Any:
        return iter(range(RANK, self.count, SIZE))


class Unrepeatable(Count):
    """All samples on the main process, and no two passes alike on the others."""

    def __init__(self) -> None:
        super().__init__(9)

    def __iter__(self) -> Any:
        self.reads += 100
        return iter(range(RANK * self.reads, RANK * self.reads + self.count))


class Breaks(Count):
    def __iter__(self) -> Any:
        yield from range(3 * SIZE)
        raise OSError("the disk is gone")


class BreaksOnOne:
    """Items that are batches, of which rank 1 cannot read its third."""

    def __len__(self) -> int:
        return 4 * SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2 * SIZE + 1:
            raise OSError("the disk is gone")
        return torch.arange(index % 3 + 1)


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([torch.tensor([1, 2]), torch.tensor([3])])


class Unseeded(Sampler[int]):
    def __init__(self) -> None:
        self._random = random.Random(RANK)

    def __iter__(self) -> Any:
        return iter(self._random.sample(range(8), 8))

    def __len__(self) -> int:
        return 8


def prepare(gang: Gang, loader: DataLoader[Any], **options: Any) -> PreparedLoader:
    return prepare_loader(
        loader, ranks=SIZE, rank=RANK, device=CPU, options=DataLoaderConfiguration(**options), data_ranks=gang
    )


def one_pass(gang: Gang, loader: PreparedLoader) -> list[list[list[int]]]:
    """For each batch, every rank's samples; all ranks must have the same number of batches."""
    mine, flags = [], []
    for batch in loader:
        batch = batch["x"] if isinstance(batch, dict) else batch
        assert loader.is_filler or len(batch) == loader.samples_here
        mine.append([] if loader.is_filler else batch.tolist())
        flags.append([list(loader.shares), loader.end_of_dataloader])
    everyone = gang.gather_objects([mine, flags])
    assert all(seen == flags for _, seen in everyone), everyone
    assert [last for _, last in flags] == [False] * (len(flags) - 1) + [True], flags
    return [list(parts) for parts in zip(*(batches for batches, _ in everyone), strict=True)]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [i for parts in steps for part in parts for i in part]


def fails(kind: type[Exception], words: str, run: Any) -> None:
    with pytest.raises(kind, match=words):
        run()


def shared_streams(gang: Gang) -> None:
    for count, workers in ((0, 0), (1, 0), (17, 0), (17, 2)):
        loader = prepare(gang, DataLoader(Count(count), batch_size=2, num_workers=workers))
        for _ in range(1 if count == 0 else 2):
            steps = one_pass(gang, loader) if count else list(loader)
            assert flat(steps) == list(range(count))
    parts = prepare(gang, DataLoader(OwnPart(41), batch_size=2), use_stateful_dataloader=True)
    for _ in range(2):
        assert sorted(flat(one_pass(gang, parts))) == list(range(41))
    next(iter(parts))
    state, again = (
        parts.state_dict(),
        prepare(gang, DataLoader(OwnPart(41), batch_size=2), use_stateful_dataloader=True),
    )
    again.load_state_dict(state)
    assert sorted(flat(one_pass(gang, again))) == list(range(2 * SIZE, 41))
    fails(DataError, "no sample at all", lambda: list(prepare(gang, DataLoader(OwnPart(1), batch_size=2))))
    fails(TypeError, "no length", lambda: len(prepare(gang, DataLoader(Count(4)), dispatch_batches=True)))


def streams_split_by_node(gang: Gang) -> None:
    rows = HubStream.from_generator(_rows, gen_kwargs={"shards": [5, 1, 3][:SIZE]})
    loader = prepare(gang, DataLoader(split_dataset_by_node(rows, RANK, SIZE), batch_size=2))
    steps = one_pass(gang, loader)
    assert len(steps) == 3, "as many as the longest part has"
    assert sorted(flat(steps)) == sorted(100 * n + i for n in [5, 1, 3][:SIZE] for i in range(n))
    fails(
        ConfigError,
        "split by node",
        lambda: prepare(
            gang, DataLoader(split_dataset_by_node(rows, RANK, SIZE), batch_size=2), dispatch_batches=True
        ),
    )


def ranks_without_data_and_ranks_that_fail(gang: Gang) -> None:
    rows = HubStream.from_generator(_rows, gen_kwargs={"shards": [4]})
    part = split_dataset_by_node(rows, RANK, SIZE)
    assert sorted(flat(one_pass(gang, prepare(gang, DataLoader(part, batch_size=2))))) == list(
        range(400, 404)
    )
    empty = HubStream.from_generator(_rows, gen_kwargs={"shards": [4] + [0] * (SIZE - 1)})
    alone = prepare(gang, DataLoader(split_dataset_by_node(empty, RANK, SIZE), batch_size=2))
    fails(DataError, "have no batch at all", lambda: list(alone))
    seen: list[int] = []
    broken = prepare(gang, DataLoader(BreaksOnOne(), batch_size=None))
    kind, words = (OSError, "the disk is gone") if RANK == 1 else (DataError, r"ranks \[1\] failed")
    with pytest.raises(kind, match=words):
        seen.extend(map(len, broken))
    assert gang.gather_objects(len(seen)) == [1] * SIZE, "all stop at the same batch"


def _rows(shards: list[int]) -> Any:
    for count in shards:
        for i in range(count):
            yield {"x": 100 * count + i}


def batches_of_unknown_size(gang: Gang) -> None:
    items = [torch.arange(n) + 10 * n for n in (3, 1, 4, 2, 5)]
    loader = prepare(gang, DataLoader(items, batch_size=None))
    steps = one_pass(gang, loader)
    assert flat(steps) == [int(i) for item in items for i in item]
    state = []
    for batch in loader:
        state.append((loader.state_dict(), batch))
        if len(state) == 1:
            break
    resumed = prepare(gang, DataLoader(items, batch_size=None), use_stateful_dataloader=True)
    resumed.load_state_dict(state[0][0])
    assert one_pass(gang, resumed) == steps[1:]
    resumed.load_state_dict({**state[0][0], "unit": "batches of 9 processes"})
    assert one_pass(gang, resumed) == steps, "positions of another number of processes mean nothing"


def dispatched(gang: Gang) -> None:
    for count in (1, 8, 13):
        source = Count(count)
        steps = one_pass(gang, prepare(gang, DataLoader(source, batch_size=3), dispatch_batches=True))
        assert flat(steps) == list(range(count))
        read = count if RANK == 0 else min(count, 4)
        assert source.reads == read, (
            "the main process alone reads, but for the first samples, which are compared"
        )
        loader = prepare(
            gang, DataLoader(Count(count), batch_size=4), dispatch_batches=True, split_batches=True
        )
        assert flat(one_pass(gang, loader)) == list(range(count))
    shuffled = DataLoader(list(range(20)), batch_size=2, shuffle=True)
    both = [prepare(gang, shuffled, dispatch_batches=d, data_seed=7) for d in (True, False)]
    assert len(both[0]) == len(both[1])
    for _ in range(2):
        one, other = ([flat([step]) for step in one_pass(gang, loader)] for loader in both)
        assert one == other, "the same global batches"
    dropping = DataLoader(Count(5 * SIZE + 1), batch_size=2, drop_last=True)
    assert len(one_pass(gang, prepare(gang, dropping, dispatch_batches=True))) == 2
    texts = prepare(
        gang, DataLoader([{"x": i, "t": str(i)} for i in range(6)], batch_size=6), dispatch_batches=True,
        split_batches=True,
    )  # fmt: skip
    for batch in texts:
        assert batch["t"] == [str(int(i)) for i in batch["x"]], "lists are cut with the tensors"


def dispatching_streams_that_differ_between_ranks(gang: Gang) -> None:
    for batch_size, workers in ((1, 0), (2, 0), (8, 1), (None, 0)):
        parts = DataLoader(OwnPart(41), batch_size=batch_size, num_workers=workers)
        loader = prepare(gang, parts, dispatch_batches=True)
        words = "dispatch_batches=True: OwnPart returns other samples on ranks"
        fails(ConfigError, words, functools.partial(list, loader))
    for other in (Unrepeatable(), Count(0) if RANK else Count(9), Breaks(0) if RANK == 1 else Count(9)):
        loader = prepare(gang, DataLoader(other, batch_size=2), dispatch_batches=True)
        assert flat(one_pass(gang, loader)) == list(range(9)), "what the main process reads"


def dispatching_what_cannot_be_dealt(gang: Gang) -> None:
    own = OwnLoader([0])
    fails(DataError, "__iter__ of its own", lambda: prepare(gang, own))
    steps = one_pass(gang, prepare(gang, own, dispatch_batches=True))
    assert flat(steps) == [1, 2, 3]
    broken = prepare(gang, DataLoader(Breaks(0), batch_size=1), dispatch_batches=True)
    kind, words = (OSError, "the disk") if RANK == 0 else (DataError, "OSError: the disk is gone")
    fails(kind, words, lambda: list(broken))
    odd = prepare(gang, DataLoader([{1, 2}, object()], batch_size=1, collate_fn=list), dispatch_batches=True)
    words = r"batch\[0\] is a object.*dispatch_batches=False"
    fails(DataError, words, lambda: list(odd))
    sets = prepare(gang, DataLoader([{1, RANK}] * SIZE, batch_size=1, collate_fn=list), dispatch_batches=True)
    assert list(sets) == [[{0, 1}]], "as the main process reads them"


def agreements(gang: Gang) -> None:
    torch.manual_seed(RANK)
    steps = one_pass(gang, prepare(gang, DataLoader(list(range(30)), batch_size=2, shuffle=True)))
    assert sorted(flat(steps)) == list(range(30)), "rank 0's number decides"
    generator = torch.Generator().manual_seed(RANK)
    own = DataLoader(list(range(30)), batch_size=2, shuffle=True, generator=generator)
    assert sorted(flat(one_pass(gang, prepare(gang, own)))) == list(range(30))
    fails(DataError, "different sizes", lambda: prepare(gang, DataLoader(list(range(3 + RANK)))))
    of_one = generator if RANK == 0 else None
    one_sided = DataLoader(list(range(8)), shuffle=True, generator=of_one)
    fails(DataError, r"numbers of generators: \[\d, 0", lambda: prepare(gang, one_sided))
    fails(
        DataError, "different orders", lambda: prepare(gang, DataLoader(list(range(8)), sampler=Unseeded()))
    )


def main() -> None:
    gang = join(world_from_environment(), CPU)
    checks = (
        shared_streams,
        streams_split_by_node,
        batches_of_unknown_size,
        ranks_without_data_and_ranks_that_fail,
        dispatched,
        dispatching_streams_that_differ_between_ranks,
        dispatching_what_cannot_be_dealt,
        agreements,
    )
    for check in checks:
        check(gang)
        gang.barrier()
    leave()
