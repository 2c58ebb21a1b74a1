"""A few rows of a dataset as checksums, which show if another process or a checkpoint has the same data."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, TensorDataset

from windlass.data.bookmark import checksum
from windlass.data.order import known_length
from windlass.data.seeding import Sandbox

_SEED = 0  # of what a row draws while it is shown


def shown_rows(dataset: Any) -> list[list[int]] | None:
    """The numbers and checksums of the first, a middle and the last row: [[number, checksum], ...]. No generator is
    moved. None if there are no rows with numbers, or they cannot be read, or not alike twice.
    """
    size = known_length(dataset)
    if not size:
        return None
    sandbox, places = Sandbox(), sorted({0, size // 2, size - 1})

    def read() -> list[list[int]]:
        with sandbox:
            sandbox.seed(_SEED)
            return [[place, checksum(dataset[place])] for place in places]

    try:
        found = read()
        return found if read() == found else None
    # What raises is the script's own code: the batch that reads such a row says so, with the row's number.
    except Exception:
        return None


def is_table(dataset: Any) -> bool:
    """Return True if rows can be read at any time, cheaply and without an effect: lists, tensors, and what has
    columns, also in parts of them.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, list | tuple | TensorDataset) or hasattr(dataset, "column_names")


def rows_to_keep(dataset: Any) -> list[list[int]] | None:
    """`shown_rows` of a table, for a checkpoint; None of other data, and of a table whose rows depend on the epoch."""
    if not is_table(dataset) or hasattr(dataset, "set_epoch"):
        return None
    # Without the transform of a `datasets.Dataset`, which may draw from a generator of its own.
    return shown_rows(dataset.with_format(None) if hasattr(dataset, "with_format") else dataset)
