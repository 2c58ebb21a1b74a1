"""What Windlass uses of `datasets` and `pyarrow`: tables of other programs, read and made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.core.activity import looking_for
from windlass.core.errors import DataError
from windlass.core.optional import is_imported, require
from windlass.text.token_rows import TokenRows


def is_table(dataset: Any) -> bool:
    return is_imported("datasets") and isinstance(dataset, require("datasets", "read a dataset").Dataset)


class StoredRows:
    """The rows of a `datasets.Dataset` as it stores them: images are records of bytes or a path, and not decoded."""

    def __init__(self, table: Any) -> None:
        self._rows, self._features = table.with_format("arrow"), table.features

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self._rows[int(index) : int(index) + 1].to_pylist()
        return {name: unfilled(value, self._features[name]) for name, value in row.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[at] for at in range(len(self)))

    def select(self, indices: list[int]) -> StoredRows:
        """Return some of the rows."""
        return StoredRows(self._rows.select(indices))


def is_stream(dataset: Any) -> bool:
    """Return True for a `datasets.IterableDataset`."""
    return is_imported("datasets") and isinstance(
        dataset, require("datasets", "read a stream").IterableDataset
    )


def first_of(stream: Any) -> Any:
    """The first row of a stream. Raises DataError if it has none."""
    for row in stream:
        return row
    raise DataError("the dataset has no rows")


def open_stream(source: str, kind: str, subset: str | None, split: str) -> Any:
    """Return an `IterableDataset` of the rows of a file (`kind` is jsonl or parquet) or of a split of a dataset of the
    hub. Raises DataError if it cannot be opened.
    """
    datasets = require("datasets", "read a stream")
    try:
        if kind == "hub":
            return datasets.load_dataset(source, subset, split=split, streaming=True)
        reader = "json" if kind == "jsonl" else kind
        return datasets.load_dataset(reader, data_files=source, split="train", streaming=True)
    except Exception as error:  # as for `load_hub`
        raise DataError(f"{source!r} cannot be read as a stream: {error}") from error


def load_hub(name: str, subset: str | None, split: str) -> Any:
    """Return a split of a dataset of the hub. Raises DataError if it cannot be loaded."""
    datasets = require("datasets", "read a dataset of the hub")
    try:
        with looking_for(name):
            return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, name, split and configuration raise different types
        raise DataError(f"hub dataset {name!r} (split {split!r}) cannot be loaded: {error}") from error


def parquet_rows(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with those of `columns` that it has; with all if it has none of them. Nulls
    that the file has put into records for the keys of other records are left out.
    """
    parquet = require("pyarrow.parquet", "read parquet files")
    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for batch in file.iter_batches(columns=wanted or None):
            for row in batch.to_pylist():
                yield {name: _without_nulls(value) for name, value in row.items()}
    except MemoryError as error:
        raise DataError(f"{path}: there is not enough memory to read this parquet file ({error})") from None
    except Exception as error:
        # pyarrow raises several unrelated types for a damaged file, also while it is read.
        raise DataError(f"{path}: not a readable parquet file ({error})") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(item) for item in value]
    return value


def table_bytes(table: Any) -> Iterator[bytes]:
    """Yield the content of a `datasets.Dataset`: names, types and values, in the order of its rows."""
    arrow = require("pyarrow", "read a dataset")
    yield str(table.features).encode()
    for batch in table.with_format("arrow").iter(1000):
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, batch.schema.remove_metadata()) as writer:
            writer.write_table(batch.combine_chunks().replace_schema_metadata(None))
        yield sink.getvalue().to_pybytes()


def unfilled(value: Any, feature: Any) -> Any:
    """Return a value of a table without the nulls that a table puts into each record for the keys of other records.
    `feature` is the type of the value as `datasets` describes it, a dict for records. JSON is left as it is.
    """
    if isinstance(feature, Mapping):
        if not isinstance(value, Mapping):
            return value
        return {k: unfilled(item, feature.get(k)) for k, item in value.items() if item is not None}
    items = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    if items is None or not isinstance(value, list):
        return value
    return [unfilled(item, items) for item in value]


def has_records(feature: Any) -> bool:
    """Return True if values of this type hold records."""
    if isinstance(feature, Mapping):
        return True
    items = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return items is not None and has_records(items)


def of_any_length(column: Any) -> Any:
    """Return an Arrow column; one of lists of a fixed size as lists of any length, which packed rows have."""
    if not hasattr(column.type, "list_size"):
        return column
    return column.cast(require("pyarrow", "pack a dataset").list_(column.type.value_type))


def table_of(rows: TokenRows) -> Any:
    """Return a `datasets.Dataset` of int32 lists on the memory of `rows`, which is not copied."""
    datasets = require("datasets", "make a dataset of prepared rows")
    arrow = require("pyarrow", "make a dataset of prepared rows")
    # Offsets of a list are 32-bit numbers; a table beyond that has several chunks.
    chunks: dict[str, list[Any]] = {name: [] for name in rows.column_names}
    for first, last in _chunks(rows):
        for name, made in chunks.items():
            borders = rows.borders(name)[first : last + 1]
            values = arrow.array(rows.flat[name][borders[0] : borders[-1]])
            made.append(
                arrow.ListArray.from_arrays(arrow.array((borders - borders[0]).astype("int32")), values)
            )
    kind = arrow.list_(arrow.int32())
    columns = [arrow.chunked_array(made, type=kind) for made in chunks.values()]
    return datasets.Dataset(arrow.Table.from_arrays(columns, names=list(chunks)))


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
