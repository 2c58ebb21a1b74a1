"""Reading and collating one micro-batch, with randomness that depends on the samples alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from operator import length_hint
from typing import Any

from windlass.core.rng import STREAM_COLLATE, STREAM_SAMPLE, derive_seed, seed_generators
from windlass.core.types import Collator
from windlass.data.seeding import DrawWatch, Sandbox, collator_reseeder, fingerprint, set_epochs

_AS_THEY_ARE = nullcontext()


class Fetch:
    """`fetch(epoch, ids)` -> collated batch, the same bits in any process and after any history.

    Sample i is read under generators seeded by (seed, epoch, i); collation under (seed, epoch, first id).
    Seeding three generators costs 8 us a sample, so a dataset whose reading and collating draw nothing is read
    without seeds, and watched. If it does draw later, that batch is read again with seeds, and so is every later one.

    Args:
        dataset: anything with `__getitem__`; `__getitems__(list of ids)` is used if it has one.
        collate: list of samples -> batch.
        seed: the run's data seed.
    """

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._sandbox, self._watch = Sandbox(), DrawWatch()
        self._quiet: bool | None = None  # draws nothing; None: not known before the first batch
        self._epoch: int | None = None
        self._bind()

    def _bind(self) -> None:
        self._read_many: Callable[[list[int]], Any] = getattr(self._dataset, "__getitems__", self._one_by_one)
        self._reseed_collator = collator_reseeder(self._collate)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_read_many", "_reseed_collator")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a worker that was spawned
        self.__dict__.update(state)
        self._bind()

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, epoch: int, ids: list[int], isolate: bool = True) -> Any:
        """The batch of these samples.

        Args:
            isolate: leave Python's generator exactly as it was; otherwise two draws are taken from it, which is
                cheaper. NumPy's and PyTorch's are always left as they were.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            set_epochs(epoch, self._dataset)
        if self._quiet:
            with self._sandbox if isolate else _AS_THEY_ARE, self._watch:
                batch = self._collated(self._read_many(ids), ids)
            if not self._watch.drew:
                return batch
            self._quiet = False
        elif not isolate:
            # The watch's two draws, without a watch: what is known of the dataset by now differs between a run and
            # its resumption, and must not show in the generator.
            random.random()
            random.random()
        with self._sandbox:
            return self._seeded(ids)

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        dataset, coming = self._dataset, iter(ids)
        try:
            return [dataset[index] for index in coming]
        except Exception as error:
            index = ids[len(ids) - length_hint(coming) - 1]
            error.add_note(f"raised while reading sample {index} of {type(dataset).__name__}")
            raise

    def _seeded(self, ids: list[int]) -> Any:
        """Read and collate, seeding before each; the first batch shows if seeding is needed."""
        learning, epoch = self._quiet is None, self._epoch or 0
        drew, samples = False, []
        for index in ids:
            seed_generators(derive_seed(STREAM_SAMPLE, self._seed, epoch, index))
            before = fingerprint() if learning else None
            samples += self._one_by_one([index])
            drew = drew or (learning and fingerprint() != before)
        seed_generators(derive_seed(STREAM_COLLATE, self._seed, epoch, ids[0]))
        before = fingerprint() if learning else None
        batch = self._collated(samples, ids)
        if learning:
            self._quiet = not drew and fingerprint() == before
        return batch

    def _collated(self, samples: list[Any], ids: list[int]) -> Any:
        if self._reseed_collator is not None:
            self._reseed_collator(self._epoch or 0, ids[0])
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"raised while collating the samples {ids[:16]}{'...' if len(ids) > 16 else ''}")
            raise


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
        self._sandbox = Sandbox()

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, epoch: int, ids: list[int], isolate: bool = True) -> Any:
        with self._sandbox:
            self._sandbox.seed(derive_seed(STREAM_SAMPLE, self._seed, epoch, ids[0]))
            return self._convert(self._dataset[ids if self._many else ids[0]])
