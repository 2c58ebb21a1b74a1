"""Reading and collating one micro-batch, with randomness that depends on the samples alone."""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from typing import Any

from windlass.core.rng import STREAM_COLLATE, STREAM_SAMPLE, derive_seed
from windlass.core.types import Collator
from windlass.data.seeding import Sandbox, collator_reseeder, fingerprint


class Fetch:
    """`fetch(epoch, ids)` -> collated batch, the same bits in any process and after any history.

    Sample i is read under generators seeded by (seed, epoch, i); collation under (seed, epoch, first id).
    Seeding three generators costs 8 us a sample, so a dataset (or collator) that draws nothing is read
    without: the generators rest in a known state, and when they are found moved after all, the batch is read
    again, seeded, and so is every later one.

    Args:
        dataset: anything with `__getitem__`; `__getitems__(list of ids)` is used where there is one.
        collate: list of samples -> batch.
        seed: the run's data seed.
    """

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._sandboxes = (Sandbox(python=False), Sandbox(python=True))
        self._quiet_reads: bool | None = None  # None: not known before the first batch
        self._quiet_collate: bool | None = None
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
        """`isolate` puts Python's generator back too; NumPy's and PyTorch's always are."""
        if epoch != self._epoch:
            self._enter(epoch)
        sandbox = self._sandboxes[isolate]
        with sandbox:
            if self._quiet_reads:
                sandbox.rest()
                samples = self._read_many(ids)
                if self._quiet_collate:
                    batch = self._collated(samples, ids)
                    if not sandbox.disturbed():
                        return batch
                elif not sandbox.disturbed():
                    return self._collated_seeded(samples, ids, sandbox)
            return self._collated_seeded(self._read_seeded(ids, sandbox), ids, sandbox)

    def _enter(self, epoch: int) -> None:
        self._epoch = epoch
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _one_by_one(self, ids: list[int]) -> list[Any]:
        dataset, coming = self._dataset, iter(ids)
        try:
            return [dataset[index] for index in coming]
        except Exception as error:
            index = ids[len(ids) - length_hint(coming) - 1]
            error.add_note(f"raised while reading sample {index} of {type(dataset).__name__}")
            raise

    def _read_seeded(self, ids: list[int], sandbox: Sandbox) -> list[Any]:
        learning, drew, samples = self._quiet_reads is not False, False, []
        for index in ids:
            sandbox.seed(derive_seed(STREAM_SAMPLE, self._seed, self._epoch or 0, index))
            before = fingerprint() if learning else None
            samples += self._one_by_one([index])
            drew = drew or (learning and fingerprint() != before)
        if learning:
            self._quiet_reads = not drew
        return samples

    def _collated_seeded(self, samples: list[Any], ids: list[int], sandbox: Sandbox) -> Any:
        sandbox.seed(derive_seed(STREAM_COLLATE, self._seed, self._epoch or 0, ids[0]))
        learning = self._quiet_collate is not False
        before = fingerprint() if learning else None
        batch = self._collated(samples, ids)
        if learning:
            self._quiet_collate = fingerprint() == before
        return batch

    def _collated(self, samples: list[Any], ids: list[int]) -> Any:
        if self._reseed_collator is not None:
            self._reseed_collator(self._epoch or 0, ids[0])
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"raised while collating the samples {ids[:16]}{'...' if len(ids) > 16 else ''}")
            raise
