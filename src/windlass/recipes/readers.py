"""Read records from files: one reader per format; errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.core.whole_file import parse_json
from windlass.recipes.arranged_rows import columns_read
from windlass.recipes.digits import digit_questions
from windlass.recipes.schema import PATHLESS, UNKNOWN_ENDING, DataSpec, format_of
from windlass.text.forms import COLUMNS, has_form
from windlass.text.image_messages import COLUMNS as OF_IMAGES
from windlass.text.tables import StoredRows, load_hub, parquet_rows

logger = get_job_logger(__name__)

# (file and line or row, values)
Record = tuple[str, dict[str, Any]]
# Cells of a csv file may be whole documents; the default limit of the csv module is 128 KiB.
LONGEST_CELL = 1 << 30
# What the gzip module raises besides OSError if a file is truncated or has wrong bytes.
_OF_DAMAGED_GZIP = (EOFError, zlib.error)


def read_records(source: str, data: DataSpec, split: str = "train") -> list[Record]:
    """Return the records of `source` in order, at most `data.max_samples`. Raises DataError if a line or a file cannot
    be read, or there are no records.

    Args:
        source: path, or hub name if `data.format` is hub.
        split: for the hub reader only.
    """
    kind = format_of(source, data)
    if kind is None:
        raise DataError(f"{source}: {UNKNOWN_ENDING}")
    records = _hub(source, data, split) if kind == "hub" else READERS[kind](Path(source), data)
    found = list(islice(records, data.max_samples))
    if kind not in PATHLESS:
        folder = Path(source).parent
        # As in the files of other tools; other paths of a recipe are relative to the working directory.
        found = [
            (where, {k: _placed(v, folder) if k in OF_IMAGES else v for k, v in row.items()})
            for where, row in found
        ]
    if not found:
        raise DataError(f"{source or kind}: has no records")
    return found


def _placed(image: Any, folder: Path) -> Any:
    """The value of a column of images in a file: a relative path in it begins in the folder of that file."""
    if isinstance(image, list):
        return [_placed(one, folder) for one in image]
    is_path = isinstance(image, str) and "://" not in image and not image.startswith("data:")
    return str(folder / image) if is_path else image


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) without line ends. Only line feeds separate lines, as in other tools."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text (byte {error.start} of the line)") from None
    except (OSError, *_OF_DAMAGED_GZIP) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _jsonl(path: Path, data: DataSpec) -> Iterator[Record]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except json.JSONDecodeError as error:
            shown = line if len(line) <= 80 else line[:77] + "..."
            raise DataError(
                f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno}): {shown}"
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f"{path}:{number}: each line must be a JSON object, this one is a {type(value).__name__}"
            )
        yield f"{path}:{number}", value


def _json(path: Path, data: DataSpec) -> Iterator[Record]:
    """A list of objects, as Alpaca and ShareGPT come; or lines of objects, under the wrong name."""
    text = "\n".join(line for _, line in _lines(path))
    if text.lstrip().startswith("{"):
        yield from _jsonl(path, data)
        return
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})"
        ) from None
    for number, value in enumerate(found if isinstance(found, list) else [found], 1):
        if not isinstance(value, dict):
            raise DataError(
                f"{path}: item {number} must be a JSON object, and is a {type(value).__name__}; a json file holds "
                "a list of objects, or one on each line"
            )
        yield f"{path}: item {number}", value


def _table(path: Path, data: DataSpec, *, delimiter: str, quoting: Any) -> Iterator[Record]:
    csv.field_size_limit(LONGEST_CELL)
    lines = (line + "\n" for _, line in _lines(path))
    # Strict: otherwise a quotation mark that is never closed makes one cell of the rest of the file.
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    names = list(data.columns) if data.columns else None
    _refuse_twins("data.columns", names or [])
    try:
        for cells in reader:
            if not cells:
                continue
            if names is None:
                names = _header(path, cells, data)
                _refuse_twins(f"{path}:1", names)
                continue
            where = f"{path}:{reader.line_num}"
            # An unquoted delimiter in a text moves all cells after it into other columns.
            if len(cells) != len(names):
                raise DataError(f"{where}: {len(cells)} columns, {len(names)} expected ({', '.join(names)})")
            yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}") from None


def _header(path: Path, cells: list[str], data: DataSpec) -> list[str]:
    if data.rename or data.messages or data.prompt_format:
        return cells  # what these name is checked row by row
    pair = [name for name in (data.prompt_column, data.completion_column) if name is not None]
    if not all(name in cells for name in pair or [data.text_column]) and (pair or not has_form(cells)):
        shown = ", ".join(cell[:40] for cell in cells)
        raise DataError(
            f"{path}:1: no column {(pair or [data.text_column])[0]!r} in the first line ({shown}). Set "
            f"data.{'prompt_column' if pair else 'text_column'} if that line is a header, else name the columns: "
            "data.columns='[text, label]'"
        )
    return cells


def _refuse_twins(where: str, names: list[str]) -> None:
    """Raise DataError if two columns have one name, by which only the second could be read."""
    twins = [name for name, count in Counter(names).items() if count > 1 and name]
    if twins:
        raise DataError(f"{where}: several columns have the name {twins[0]!r}; give each a name of its own")


def _txt(path: Path, data: DataSpec) -> Iterator[Record]:
    """The whole file is one text."""
    text = "\n".join(line for _, line in _lines(path))
    if text.strip():
        yield str(path), {data.text_column: text + "\n"}


def _parallel(path: Path, data: DataSpec) -> Iterator[Record]:
    """Lines of two files: `train.de` and `train.en` for the columns de and en, or `europarl.de-en.de` and
    `europarl.de-en.en`.
    """
    # A whole part of the name, and the last one: others name the pair, or only begin like the column (`x.dev.de`).
    before, found, after = f"{path.name}.".rpartition(f".{data.text_column}.")
    other = path.with_name(f"{before}.{data.target_column}.{after}".removesuffix("."))
    if not found or not other.is_file():
        raise DataError(
            f"{path}: parallel text is a file with .{data.text_column} in its name (data.text_column), and one beside "
            f"it with .{data.target_column} instead (data.target_column)"
        )
    sources, targets = ([line for _, line in _lines(file)] for file in (path, other))
    if len(sources) != len(targets):
        raise DataError(
            f"{path} has {len(sources)} lines and {other} has {len(targets)}: they must be parallel"
        )
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        yield f"{path}:{number}", {data.text_column: source, data.target_column: target}


def _folder(path: Path, data: DataSpec) -> Iterator[Record]:
    """Each text file below `path` is a record, with the name of its folder as label."""
    endings = (".txt", ".text", ".md")
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in endings and p.is_file())
    # Hidden ones are of other programs: `.ipynb_checkpoints` is not a class.
    files = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    empty = []
    for file in first_of_folders(files, data.max_samples):
        texts = list(_txt(file, data))
        if not texts:
            empty.append(file)
        for where, values in texts:
            yield where, {**values, data.label_column: file.parent.name}
    if empty:
        logger.warning(
            "%s: left out %d file(s) without text, the first of them %s", path, len(empty), empty[0]
        )


def first_of_folders(files: list[Path], most: int | None) -> list[Path]:
    """Return at most `most` of sorted files, in their order: the first of each folder, then the second of each, and so
    on. The first files as they are sorted may all have one class, that of the first folder.
    """
    if most is None:
        return files
    counts: Counter[Path] = Counter()

    def turn(file: Path) -> int:
        counts[file.parent] += 1
        return counts[file.parent]

    return sorted(sorted(files, key=turn)[:most])


def _parquet(path: Path, data: DataSpec) -> Iterator[Record]:
    named = (
        data.text_column,
        data.label_column,
        data.target_column,
        data.prompt_column,
        data.completion_column,
    )
    rows = parquet_rows(
        path, {*COLUMNS, *OF_IMAGES, *columns_read(data), *(name for name in named if name is not None)}
    )
    for row, values in enumerate(rows, 1):
        yield f"{path}: row {row}", values


def _hub(name: str, data: DataSpec, split: str) -> Iterator[Record]:
    for row, values in enumerate(StoredRows(load_hub(name, data.subset, split))):
        yield f"{name}[{split}] row {row}", values


def _python_docs(_: Path, data: DataSpec) -> Iterator[Record]:
    """English that every Python has: the language reference of `help("if")`."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield f"pydoc_data.topics[{name!r}]", {data.text_column: text}


def _digits(_: Path, data: DataSpec) -> Iterator[Record]:
    for number, row in enumerate(digit_questions()):
        yield f"digits: image {number}", row


READERS: dict[str, Callable[[Path, DataSpec], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": partial(_table, delimiter=",", quoting=csv.QUOTE_MINIMAL),
    "tsv": partial(_table, delimiter="\t", quoting=csv.QUOTE_NONE),  # quotation marks are text there
    "txt": _txt,
    "parallel": _parallel,
    "folder": _folder,
    "parquet": _parquet,
    "python-docs": _python_docs,
    "digits": _digits,
}


def column(records: list[Record], name: str) -> list[Any]:
    """Return the values of column `name`. Raises DataError for a record without a value, with its columns."""
    values = []
    for where, record in records:
        value = record.get(name)
        if value is None:
            have = ", ".join(map(str, record)) or "none"
            what = "is empty" if name in record else f"is missing; this record has: {have}"
            raise DataError(f"{where}: column {name!r} {what}")
        values.append(value)
    return values


def texts(records: list[Record], name: str) -> list[str]:
    """Return the values of a column of text; otherwise as `column`."""
    values = column(records, name)
    for (where, _), value in zip(records, values, strict=True):
        if not isinstance(value, str):
            raise DataError(f"{where}: column {name!r} must hold text, not {type(value).__name__}")
    return values
