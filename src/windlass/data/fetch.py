"""Reading and collating one micro-batch, with randomness that depends on the samples alone."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from windlass.core.errors import DataError
from windlass.core.rng import STREAM_COLLATE, STREAM_SAMPLE, derive_seed, seed_generators
from windlass.core.types import Collator
from windlass.data.batch_reader import DealtBatch, pin
from windlass.data.seeding import DatasetEpoch, Sandbox, collator_reseeder, fingerprint

_SHOWN = 16  # samples that a note on an error lists
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_TORCH = torch.default_generator
_draw_python = random.random
# Without the conversions of `random.getstate` and `random.setstate`.
_state_of_python, _set_python = super(random.Random, _PYTHON).getstate, super(random.Random, _PYTHON).setstate
# Of the C library that this process has loaded.
_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class DrawWatch:
    """Detects draws from one of the three generators, at a fifth of the cost of seeding them.

    NumPy's and PyTorch's states are compared as bytes. Python's cannot be read so cheaply: a twin is kept in
    step with it, and two numbers are drawn for each batch, one before and one after. If reading did draw, all three
    are restored.

    Calls that look free in a tight loop cost microseconds between the forward and the backward of a step, where their
    code is cold; hence memory is read here, rather than the libraries asked.
    """

    def __init__(self) -> None:
        self._twin = random.Random(0)
        self._draw_twin = self._twin.random
        self._bits: Any = None
        self.drew = False

    def __reduce__(self) -> Any:
        # A worker constructs its own: the twin is in step with the generator of this process.
        return type(self), ()

    def __enter__(self) -> DrawWatch:
        if _draw_python() != self._draw_twin():
            self._twin.setstate(random.getstate())  # other code drew: synchronize the twin
        self._gauss = _PYTHON.gauss_next
        bits = get_bit_generator()
        if bits is not self._bits:
            self._bits, self._twister = bits, _memory_of(bits)
        self._numpy = self._twister.tobytes()
        self._torch = _TORCH.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        torch_state = _TORCH.get_state()
        self.drew = (
            _draw_python() != self._draw_twin()
            # `gauss` makes two numbers of two draws and keeps the second: its next call draws nothing.
            or _PYTHON.gauss_next is not self._gauss
            or self._twister.tobytes() != self._numpy
            or _compare_memory(torch_state.data_ptr(), self._torch.data_ptr(), torch_state.numel()) != 0
        )
        if self.drew:
            random.setstate(self._twin.getstate())
            _PYTHON.gauss_next = self._gauss
            self._twister[:] = self._numpy
            _TORCH.set_state(self._torch)


class StrictWatch(DrawWatch):
    """Leaves Python's generator as it was, too, which costs three times as much."""

    def __enter__(self) -> DrawWatch:
        self._python = _state_of_python()
        super(random.Random, self._twin).setstate(self._python)
        return super().__enter__()

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        _set_python(self._python)


class Fetch:
    """`fetch(epoch, ids)` -> collated batch, the same bits in any process and after any history.

    Sample i is read under generators seeded by (seed, epoch, i); collation under (seed, epoch, first id). Where a
    sampler returns a sample several times in an epoch, how many times it came before is a part of these seeds: each
    time it is augmented in another way.
    Seeding three generators costs 8 us a sample, so a dataset whose reading and collating draw nothing is read
    without seeds, and watched. If it does draw later, that batch is read again with seeds, and so is every later one.

    Args:
        dataset: anything with `__getitem__`; `__getitems__(list of ids)` is used if it has one.
        collate: list of samples -> batch.
        seed: the run's data seed.
    """

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._sandbox, self._watch, self._strict = Sandbox(), DrawWatch(), StrictWatch()
        self._quiet: bool | None = None  # draws nothing; None: not known before the first batch
        self._epoch: int | None = None
        self._bind()

    def _bind(self) -> None:
        self._dataset_epoch = DatasetEpoch.of(self._dataset)
        self._read_many: Callable[[list[int]], Any] | None = None
        if (many := getattr(self._dataset, "__getitems__", None)) is not None:
            self._read_many = partial(_read_many, many, type(self._dataset).__name__)
        self._reseed_collator = collator_reseeder(self._collate)

    def __getstate__(self) -> dict[str, Any]:
        # Two are of this process's dataset, and a function within a function cannot be sent.
        bound = ("_dataset_epoch", "_read_many", "_reseed_collator")
        return {k: v for k, v in self.__dict__.items() if k not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a worker that was spawned
        self.__dict__.update(state)
        self._bind()

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, epoch: int, ids: list[int], isolate: bool = True, repeats: Sequence[int] = ()) -> Any:
        """The batch of these samples.

        Args:
            repeats: how many times each of them came before in the epoch; empty if none did.
            isolate: leave Python's generator exactly as it was; otherwise two draws are taken from it, which is
                cheaper. NumPy's and PyTorch's are always left as they were.
        """
        if not epoch == self._epoch == self._dataset_epoch.value:
            self._epoch = epoch
            self._dataset_epoch.set(epoch)
        if self._quiet:
            with self._strict if isolate else self._watch as watch:
                many = self._read_many or self._one_by_one
                batch = self._collated(many(ids), ids, repeats)
            if not watch.drew:
                return batch
            self._quiet = False
        elif not isolate:
            # The watch's two draws, without a watch: what is known of the dataset by now differs between a run and
            # its resumption, and must not show in the generator.
            random.random()
            random.random()
        with self._sandbox:
            return self._seeded(ids, repeats)

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        dataset, coming = self._dataset, iter(ids)
        try:
            return [dataset[index] for index in coming]
        except Exception as error:
            # What the iterator has left shows which sample failed, without a counter in the loop.
            index = ids[len(ids) - length_hint(coming) - 1]
            error.add_note(f"raised while reading sample {index} of {type(dataset).__name__}")
            raise

    def _seeded(self, ids: list[int], repeats: Sequence[int]) -> Any:
        """Read and collate, seeding before each; the first batch shows if seeding is needed."""
        learning, epoch = self._quiet is None, self._epoch or 0
        drew = False
        samples: list[Any] = []
        # One at a time, also if the dataset reads many at once: each sample has a seed. By the same method as without
        # seeds, so that a dataset whose methods differ does not change with what its first batch drew.
        many = self._read_many or self._one_by_one
        for place, index in enumerate(ids):
            seed_generators(derive_seed(STREAM_SAMPLE, self._seed, epoch, index, *_again(repeats, place)))
            before = fingerprint() if learning else None
            samples += many([index])
            drew = drew or (learning and fingerprint() != before)
        seed_generators(derive_seed(STREAM_COLLATE, self._seed, epoch, ids[0], *_again(repeats, 0)))
        before = fingerprint() if learning else None
        batch = self._collated(samples, ids, repeats)
        if learning:
            self._quiet = not drew and fingerprint() == before
        return batch

    def _collated(self, samples: list[Any], ids: list[int], repeats: Sequence[int]) -> Any:
        if self._reseed_collator is not None:
            self._reseed_collator(self._epoch or 0, ids[0], *_again(repeats, 0))
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"raised while collating the samples {_listed(ids)}")
            raise


def _read_many(read: Callable[[list[int]], Any], kind: str, ids: list[int]) -> Any:
    try:
        return read(ids)
    except Exception as error:
        error.add_note(f"raised while reading the samples {_listed(ids)} of {kind}")
        raise


def _again(repeats: Sequence[int], place: int) -> tuple[int, ...]:
    """What is added to the seed of the sample at `place`: nothing when it comes for the first time in an epoch."""
    return (repeats[place],) if repeats and repeats[place] else ()


def _listed(ids: list[int]) -> str:
    return f"{ids[:_SHOWN]}{'...' if len(ids) > _SHOWN else ''}"


class FetchItem:
    """Reading for loaders without batching (`batch_size=None`), whose items are batches already.

    `fetch(epoch, ids)` -> the converted item, under generators seeded by (seed, epoch, first id).

    Args:
        convert: the loader's `collate_fn`, which gets one item, not a list.
        many: ask the dataset for `dataset[ids]`, as a batch sampler used as a sampler wants; otherwise for
            `dataset[ids[0]]`.
    """

    def __init__(self, dataset: Any, convert: Collator, seed: int, many: bool) -> None:
        self._dataset, self._convert, self._seed, self._many = dataset, convert, seed, many
        self._sandbox, self._dataset_epoch = Sandbox(), DatasetEpoch.of(dataset)
        self._epoch: int | None = None

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, epoch: int, ids: list[int], isolate: bool = True, repeats: Sequence[int] = ()) -> Any:
        if not epoch == self._epoch == self._dataset_epoch.value:
            self._epoch = epoch
            self._dataset_epoch.set(epoch)
        with self._sandbox:
            self._sandbox.seed(derive_seed(STREAM_SAMPLE, self._seed, epoch, ids[0], *_again(repeats, 0)))
            return self._convert(self._read(ids))

    def _read(self, ids: list[int]) -> Any:
        try:
            return self._dataset[ids if self._many else ids[0]]
        except Exception as error:
            what = f"samples {_listed(ids)}" if self._many else f"sample {ids[0]}"
            error.add_note(f"raised while reading {what} of {type(self._dataset).__name__}")
            raise


Fetching = Fetch | FetchItem
"""Reads and collates the samples of one task, in any process."""


def read_here(
    fetch: Fetching, epoch: int, tasks: Iterator[DealtBatch], isolated: float, pinned: bool
) -> Iterator[DealtBatch]:
    """The tasks, with their data read in this process. The first `isolated` leave Python's generator unchanged."""
    for number, task in enumerate(tasks):
        batch = fetch(epoch, task.ids, number < isolated, task.repeats)
        task.batch = pin(batch) if pinned else batch
        yield task


def _memory_of(bits: Any) -> memoryview:
    """NumPy's default generator as it lies in memory: a Mersenne twister's 624 words, and the position in them.

    Raises:
        DataError: a script has set another kind of generator, whose state has another shape.
    """
    if not isinstance(bits, np.random.MT19937):
        raise DataError(
            f"NumPy's default generator was replaced by {type(bits).__name__}; reading data repeatably needs the "
            "Mersenne twister it comes with: leave it, and give code of yours a generator of its own"
        )
    words = (ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address)
    return memoryview(words).cast("B")
