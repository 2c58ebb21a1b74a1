"""Batches that a data worker cannot send."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import ROOT, end_of
from torch.utils.data import DataLoader, IterableDataset

from windlass.core.errors import WorkerError
from windlass.data.workers import Reader, advice, read_batches

FULL = "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"


class Unsendable:
    """Fails where it is sent, as a tensor does for which there is no shared memory."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        raise RuntimeError(self.text)


def lost(samples: list[int]) -> Any:
    return Unsendable(FULL) if 5 in samples else torch.tensor(samples)


def refused(samples: list[int]) -> Any:
    """Torch's own collation puts a batch together in shared memory."""
    raise RuntimeError(FULL)


def unpicklable(samples: list[int]) -> Any:
    return lambda: samples


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def loader(collate: Any, data: Any = range(12), **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate, **options)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"data": Numbers()}])
def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place(options: dict[str, Any]) -> None:
    own = loader(lost, **options)
    batches = read_batches(own, Reader("training"))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(WorkerError) as caught:
        next(batches)
    for words in ("data worker 0 (pid ", FULL, "/dev/shm has", "--shm-size", "dataloader_num_workers"):
        assert words in str(caught.value)
    own.collate_fn = torch.tensor
    assert len(list(read_batches(own, Reader("training")))) == 6


def test_new_interpreters_have_the_same_queue() -> None:
    with pytest.raises(WorkerError, match="--shm-size"):
        list(read_batches(loader(lost, multiprocessing_context="spawn"), Reader("training")))


def test_what_torch_cannot_collate() -> None:
    with pytest.raises(WorkerError, match=r"unable to allocate shared memory(?s:.*)--shm-size"):
        list(read_batches(loader(refused), Reader("training")))


def test_what_cannot_be_pickled_is_an_error_too() -> None:
    with pytest.raises(WorkerError, match=r"could not send what it read: .*pickle") as caught:
        list(read_batches(loader(unpicklable), Reader("training")))
    assert "shm" not in str(caught.value)


def test_advice_is_given_on_shared_memory_alone() -> None:
    assert advice("the disk is on fire") == ""
    assert "--shm-size" in advice(FULL)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small /dev/shm")
def test_a_really_small_shared_memory() -> None:
    code, said = end_of(Path(ROOT / "tests/data/small_shared_memory.py"))
    if code == 77:
        pytest.skip("may not mount a file system of its own at /dev/shm")
    assert code == 0, said
    for kind in ("train", "evaluate", "loop", "collated"):
        assert f"{kind}: WorkerError with its fix" in said, said
