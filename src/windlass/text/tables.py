"""What Windlass uses of `datasets` and `pyarrow`: tables of other programs, read and made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from windlass.core.errors import DataError
from windlass.core.optional import is_imported, require
from windlass.text.token_rows import COLUMNS, TokenRows


def is_table(dataset: Any) -> bool:
    """Return True for a `datasets.Dataset`."""
    return is_imported("datasets") and isinstance(dataset, require("datasets", "read a dataset").Dataset)


def is_stream(dataset: Any) -> bool:
    """Return True for a `datasets.IterableDataset`."""
    return is_imported("datasets") and isinstance(
        dataset, require("datasets", "read a stream").IterableDataset
    )


def load_hub(name: str, subset: str | None, split: str) -> Any:
    """Return a split of a dataset of the hub. Raises DataError if it cannot be loaded."""
    datasets = require("datasets", "read a dataset of the hub")
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, name, split and configuration raise different types
        raise DataError(f"hub dataset {name!r} (split {split!r}) cannot be loaded: {error}") from error


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with those of `columns` that it has; with all if it has none of them."""
    parquet = require("pyarrow.parquet", "read parquet files")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises several unrelated types for a damaged file
        raise DataError(f"{path}: not a readable parquet file ({error})") from None
    wanted = [name for name in columns if name in file.schema_arrow.names]
    batches = file.iter_batches(columns=wanted or None)
    yield from chain.from_iterable(batch.to_pylist() for batch in batches)


def table_bytes(table: Any) -> Iterator[bytes]:
    """Yield the content of a `datasets.Dataset`: names, types and values, in the order of its rows."""
    arrow = require("pyarrow", "read a dataset")
    yield str(table.features).encode()
    for batch in table.with_format("arrow").iter(1000):
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, batch.schema.remove_metadata()) as writer:
            writer.write_table(batch.combine_chunks().replace_schema_metadata(None))
        yield sink.getvalue().to_pybytes()


def table_of(rows: TokenRows) -> Any:
    """Return a `datasets.Dataset` of int32 lists on the memory of `rows`, which is not copied."""
    datasets = require("datasets", "make a dataset of prepared rows")
    arrow = require("pyarrow", "make a dataset of prepared rows")
    # Offsets of a list are 32-bit numbers; a table beyond that has several chunks.
    chunks: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for first, last in _chunks(rows):
        offsets = (rows.offsets[first : last + 1] - rows.offsets[first]).astype("int32")
        start, end = rows.offsets[first], rows.offsets[last]
        for name in COLUMNS:
            values = arrow.array(rows.flat[name][start:end])
            chunks[name].append(arrow.ListArray.from_arrays(arrow.array(offsets), values))
    kind = arrow.list_(arrow.int32())
    columns = [arrow.chunked_array(chunks[name], type=kind) for name in COLUMNS]
    return datasets.Dataset(arrow.Table.from_arrays(columns, names=list(COLUMNS)))


def _chunks(rows: TokenRows, most: int = 2**30) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(rows):
        last = int(rows.offsets.searchsorted(rows.offsets[first] + most, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def datasets_library(purpose: str) -> Any:
    """The package datasets. `purpose` completes the sentence "datasets is needed to ..."."""
    return require("datasets", purpose)
