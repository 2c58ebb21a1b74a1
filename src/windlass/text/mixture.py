"""Several datasets as one, in given shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.core.errors import Problem, refuse
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.rng import STREAM_ORDER, derive_seed

_logger = get_job_logger(__name__)
STOPPING = ("first_exhausted", "all_exhausted")
Ints = NDArray[np.int64]
_ROUNDING = 1e-12  # above the error of a few operations in float64, below one row of 10^12


class DatasetMixture:
    """A map-style dataset that mixes others: sample i of an epoch is a pure function of the seed, the epoch and i.

    So a resumed run reads what an uninterrupted one reads, in any number of processes, and nothing has to be saved.
    Each source has a separate seed: its rows come in the same order whatever it is mixed with. An epoch has as many
    rows of a source as its share, and they continue where the epoch before ended; a source is read again, in another
    order, once all its rows were used.

    Attributes:
        wanted: name -> share of the samples, of the sum 1. An epoch has whole samples of each source (`counts`).

    Args:
        sources: name -> map-style dataset with a length.
        weights: name -> share of the samples, of any sum. None = by the number of rows.
        seed: of the order.
        seeds: name -> seed of the rows of that source. The default depends on `seed` and on the name.
        stopping_strategy: the length of an epoch, as in `datasets.interleave_datasets`: "first_exhausted" = until a
            source has no new rows; "all_exhausted" = until all rows of all sources were used.
        length: samples of an epoch, instead of `stopping_strategy`.

    Raises:
        ConfigError: names without a source, weights that are not positive, empty sources.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        *,
        seeds: Mapping[str, int] | None = None,
        stopping_strategy: str = "first_exhausted",
        length: int | None = None,
    ) -> None:
        refuse(_problems(sources, weights, seeds or {}, stopping_strategy, length))
        self.names = list(sources)
        self._settings: dict[str, Any] = {
            "weights": weights,
            "seed": seed,
            "seeds": seeds,
            "stopping_strategy": stopping_strategy,
            "length": length,
        }
        self.sources = dict(sources)
        self._sources = list(sources.values())
        self._sizes = [len(source) for source in self._sources]
        shares = np.array(
            [weights[name] for name in self.names] if weights else self._sizes, dtype=np.float64
        )
        self.wanted = dict(zip(self.names, (shares / shares.sum()).tolist(), strict=True))
        self._counts = _counts(shares / shares.sum(), self._sizes, stopping_strategy, length)
        for name, count in self.counts.items():
            if not count:  # each epoch has as many, so it is never read
                warn_once(
                    _logger,
                    f"the mixture has no sample of {name!r}: its share of {sum(self._counts):,} samples is "
                    f"{self.wanted[name]:.2g}, less than one. Raise its weight, or the length of an epoch.",
                )
        self._seed = seed
        self._seeds = [
            (seeds or {}).get(name, derive_seed(STREAM_ORDER, seed, *name.encode())) for name in self.names
        ]
        # Not 0, which `set_epoch` would take for the present one.
        self._epoch = -1
        self.set_epoch(0)

    def map_sources(self, function: Callable[[str, Any], Any]) -> DatasetMixture:
        """Return a mixture of `function(name, source)` for each source, with the same weights and seeds."""
        made = {name: function(name, source) for name, source in self.sources.items()}
        return DatasetMixture(made, **self._settings)

    def set_epoch(self, epoch: int) -> None:
        """Choose the samples of `epoch`, from 0; a loader calls this."""
        if epoch == self._epoch:
            return
        order = np.repeat(np.arange(len(self._sources), dtype=np.int64), self._counts)
        # By the epoch alone, so a resumed run finds the order without the passes before.
        np.random.default_rng(derive_seed(STREAM_ORDER, self._seed, epoch)).shuffle(order)
        rows = np.empty(len(order), dtype=np.int64)
        for source, count in enumerate(self._counts):
            rows[order == source] = self._rows(source, epoch * count, count)
        self._order, self._row, self._epoch = order, rows, epoch

    def _rows(self, source: int, first: int, count: int) -> Ints:
        """The rows of a source at the positions `first`, `first + 1`, ... of its own endless order."""
        size, found = self._sizes[source], []
        for turn in range(first // size, -(-(first + count) // size)):
            shuffled = np.random.default_rng(derive_seed(self._seeds[source], turn)).permutation(size)
            found.append(shuffled[max(first - turn * size, 0) : first + count - turn * size])
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def position(self, index: int) -> tuple[str, int]:
        """Return the source and the row of sample `index` in this epoch."""
        return self.names[int(self._order[index])], int(self._row[index])

    @property
    def counts(self) -> dict[str, int]:
        """Samples of each source in an epoch."""
        return dict(zip(self.names, self._counts, strict=True))

    @property
    def column_names(self) -> list[str]:
        """The columns of the first source."""
        first = self._sources[0]
        return list(getattr(first, "column_names", None) or first[0])

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        source, row = self._order[index], self._row[index]
        return self._sources[int(source)][int(row)]


def _counts(shares: NDArray[np.float64], sizes: list[int], stopping: str, length: int | None) -> list[int]:
    """Samples of each source in an epoch: the shares of the length, rounded so that they add up to it."""
    if length is None:
        needed = np.array(sizes) / shares
        # The quotients may be off by their last bit, and an epoch of all rows would then lack one, or repeat one.
        is_first = stopping == "first_exhausted"
        length = int(needed.min() * (1 + _ROUNDING) if is_first else np.ceil(needed.max() * (1 - _ROUNDING)))
    exact = shares * length
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")
    counts[largest[: length - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def _problems(
    sources: Mapping[str, Any],
    weights: Mapping[str, float] | None,
    seeds: Mapping[str, int],
    stopping: str,
    length: int | None,
) -> list[Problem]:
    found = []
    if not sources:
        found.append(Problem("sources", sources, "name at least one dataset"))
    for name, source in sources.items():
        if not hasattr(source, "__len__"):
            fix = "has no length, so its rows have no numbers; mix streams with datasets.interleave_datasets"
            found.append(Problem(f"sources.{name}", type(source).__name__, fix))
        elif not len(source):
            found.append(Problem(f"sources.{name}", 0, "has no rows"))
    for field, given in (("weights", weights or sources), ("seeds", seeds)):
        fix = f"no such source; there is: {', '.join(sources)}"
        found += [Problem(f"{field}.{name}", given[name], fix) for name in given if name not in sources]
    for name in sources if weights is not None else ():
        weight = weights.get(name) if weights else None
        if not isinstance(weight, Real) or not 0 < weight < float("inf"):
            found.append(Problem(f"weights.{name}", weight, "each source needs a weight above 0"))
    if stopping not in STOPPING:
        found.append(Problem("stopping_strategy", stopping, f"must be one of {', '.join(STOPPING)}"))
    if length is not None and not (isinstance(length, Integral) and length >= 1):
        found.append(Problem("length", length, "must be a whole number of 1 or more"))
    return found
