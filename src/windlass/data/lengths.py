"""How long each sample is, found once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from windlass.core.errors import DataError

_cache: weakref.WeakKeyDictionary[Any, dict[str, np.ndarray[Any, Any]]] = weakref.WeakKeyDictionary()


def sample_lengths(dataset: Any, column: str = "length", tokens: str = "input_ids") -> np.ndarray[Any, Any]:
    """Length of every sample, int64 of shape (samples,): its `column` where it has one, else `len(sample[tokens])`.

    Remembered as long as the dataset object lives, because reading every sample of a large set takes minutes. Raises
    DataError if the samples have neither.
    """
    try:
        known = _cache.setdefault(dataset, {})
    except TypeError:  # lists and the like cannot be remembered, and are quick to read
        known = {}
    if column not in known:
        known[column] = np.asarray(_measure(dataset, column, tokens), dtype=np.int64)
    return known[column]


def _measure(dataset: Any, column: str, tokens: str) -> Any:
    columns = getattr(dataset, "column_names", None)
    if columns is not None and hasattr(dataset, "select_columns"):
        if column in columns:
            return dataset.with_format(None)[column][:]
        if tokens in columns:
            narrow = dataset.with_format(None).select_columns([tokens])
            return [len(ids) for batch in narrow.iter(1000) for ids in batch[tokens]]
    return [_length(dataset[index], index, column, tokens) for index in range(len(dataset))]


def _length(sample: Any, index: int, column: str, tokens: str) -> int:
    if isinstance(sample, Mapping) or hasattr(sample, "keys"):
        if column in sample:
            return int(sample[column])
        if tokens in sample:
            return len(sample[tokens])
    has = (
        f"the columns {sorted(map(str, sample.keys()))}"
        if hasattr(sample, "keys")
        else f"the type {type(sample).__name__}"
    )
    raise DataError(
        f"sample {index} has {has}: its length is neither in {column!r} nor in {tokens!r}. "
        "Name the column that holds it with length_column_name, or use train_sampling_strategy='random'."
    )
