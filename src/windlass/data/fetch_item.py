"""Reading for loaders without batching (`batch_size=None`): the dataset's items are batches already."""

from __future__ import annotations

from typing import Any

from windlass.core.rng import STREAM_SAMPLE, derive_seed
from windlass.core.types import Collator
from windlass.data.seeding import Sandbox


class FetchItem:
    """`fetch(epoch, ids)` -> the converted item, under generators seeded by (seed, epoch, first id).

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
