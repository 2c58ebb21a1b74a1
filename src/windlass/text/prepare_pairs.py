"""Prepare a dataset of preferences: `prepare_pairs` is the one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.text.located_rows import LocatedRows, RowError
from windlass.text.pair_encoder import PairEncoder, PairOptions
from windlass.text.pair_rows import PROMPT, PairRows
from windlass.text.prepare_text import content_key
from windlass.text.summary import TextSummary
from windlass.text.tables import is_stream, is_table
from windlass.text.token_rows import TokenRows
from windlass.text.token_store import Prepared, TokenStore
from windlass.text.worker_pool import BATCH, as_rows, encode

_logger = get_job_logger(__name__)
_SHOWN = 8


def prepare_pairs(
    dataset: Any,
    tokenizer: Any,
    options: PairOptions,
    *,
    numbers: Sequence[str] = (),
    cache: str | Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Any:
    """Tokenize a dataset of preferences. What is kept on the disk does not depend on `max_length`.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a sequence of mappings, with the columns of
            `options.answers`, and "prompt" unless all answers begin with it.
        tokenizer: a `transformers` tokenizer.
        numbers: columns of numbers that are taken over if the dataset has them; a row must then have one.
        cache: folder in which the result is kept, and looked for.
        progress: called with the number of rows done.

    Returns:
        `PairRows`; a stream of rows with the same columns for a stream.

    Raises:
        ConfigError: the tokenizer has no end token.
        DataError: a row is invalid (with its number, or its place in a file), or there are none.
    """
    if is_stream(dataset):
        return _prepared_stream(dataset, tokenizer, options, numbers)
    if not len(dataset):
        raise DataError("the dataset has no rows")
    plain = dataset.with_format(None) if is_table(dataset) else dataset
    plain_options = PairOptions(answers=options.answers, whole=options.whole, eos_token=options.eos_token)
    try:
        encoder = PairEncoder(tokenizer, plain_options, plain[0])
        rows = _tokens(plain, encoder, tokenizer, plain_options, cache, options.num_proc or 1, progress)
        columns = {name: _numbers(plain, name) for name in numbers if name in _columns(plain)}
    except RowError as error:
        raise error.located(dataset) from None
    return PairRows(rows, options.answers, columns)


def within(
    rows: PairRows, options: PairOptions, name: str, dataset: Any, *, whole_sequences: bool = False
) -> tuple[PairRows, TextSummary]:
    """Return the rows that have something to learn within `options.max_length`, and their counts.

    With `truncation_mode="keep_end"` all rows have. Rows that are left out are named in the log by number, or by file
    and line.

    Args:
        name: of the dataset, for the log.
        dataset: what `rows` were prepared from.
        whole_sequences: nothing is cut: a row is left out if one of its answers does not fit.

    Raises:
        DataError: no row is left; or one is too long, and `truncation_mode` is "error".
    """
    most = options.max_length
    lengths = rows.lengths
    longest = lengths[:, 0] + lengths[:, 1:].max(axis=1)
    if most is None:
        return rows, rows.summary(most, 0)
    if options.truncation_mode == "error" and (longest > most).any():
        at = int(np.flatnonzero(longest > most)[0])
        raise RowError(
            int(rows.kept[at]),
            f"a prompt with an answer has {longest[at]} tokens, more than max_length={most}, and truncation_mode is "
            '"error". Raise max_length, or set truncation_mode to "keep_start".',
        ).located(dataset)
    if options.truncation_mode == "keep_end":
        return rows, rows.summary(most, 0)
    fits = longest <= most if whole_sequences else lengths[:, 0] < most
    lost = rows.kept[~fits]
    if not len(lost):
        return rows, rows.summary(most, 0)
    what = "an answer that does not fit into" if whole_sequences else "a prompt that fills"
    shown = ", ".join(_place(dataset, int(at)) for at in lost[:_SHOWN])
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    message = f"of the {name} dataset have {what} max_length={most}: {shown}{more}"
    if not fits.any():
        raise DataError(f"all {len(lost)} rows {message}. Raise max_length, or shorten the prompts")
    _logger.warning("dropped %d of %d rows: they %s", len(lost), len(fits), message.partition(" dataset ")[2])
    kept = rows.select(np.flatnonzero(fits))
    return kept, kept.summary(most, len(lost))


def _place(dataset: Any, row: int) -> str:
    return dataset.places[row] if isinstance(dataset, LocatedRows) else f"row {row}"


def _tokens(
    dataset: Any,
    encoder: PairEncoder,
    tokenizer: Any,
    options: PairOptions,
    cache: str | Path | None,
    workers: int,
    progress: Callable[[int], None],
) -> TokenRows:
    def made() -> Prepared:
        rows = TokenRows.joined([batch.rows for batch in encode(dataset, encoder, workers, progress)])
        return rows, TextSummary.of(rows, 0, 0)

    key = None if cache is None else content_key(dataset, tokenizer, options)
    if cache is None or key is None:
        return made()[0]
    return TokenStore(Path(str(cache)).expanduser()).get(key, made)[0]


def _columns(dataset: Any) -> set[str]:
    names = getattr(dataset, "column_names", None)
    return set(names) if isinstance(names, (list, tuple)) else set(dataset[0])


def _numbers(dataset: Any, name: str) -> Any:
    """A column of numbers, or of true and false."""
    values = dataset[name] if is_table(dataset) else [row.get(name) for row in dataset]
    for number, value in enumerate(values):
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (bool, int, float)):
            kind = "is missing or null" if value is None else f"must hold numbers, not {type(value).__name__}"
            raise RowError(number, f"column {name!r} {kind}")
    return np.asarray(list(values))


def _prepared_stream(stream: Any, tokenizer: Any, options: PairOptions, numbers: Sequence[str]) -> Any:
    example = next(iter(stream), None)
    if example is None:
        raise DataError("the dataset has no rows")
    step = PairStep(PairEncoder(tokenizer, options, example), options, stream.features)
    given = set(stream.column_names or example)
    rows = stream.map(
        step,
        with_indices=True,
        batched=True,
        batch_size=BATCH,
        remove_columns=sorted(given - set(numbers)),
    )
    most = options.max_length
    if most is None or options.truncation_mode == "keep_end":
        return rows
    return rows.filter(PairFilter(most, options.answers if options.whole else ()))


class PairStep:
    """Encodes the batches of a stream, for its `map`."""

    def __init__(self, encoder: PairEncoder, options: PairOptions, features: Any) -> None:
        self._encoder, self._answers, self._features = encoder, options.answers, features

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, Any]:
        found = self._encoder(as_rows(columns, self._features), numbers[0])
        made: dict[str, Any] = {name: [] for name in (PROMPT, *(f"{a}_ids" for a in self._answers))}
        for ids, documents in zip(found.input_ids, found.documents, strict=True):
            start = 0
            for name, length in zip(made, documents, strict=True):
                made[name].append(ids[start : start + length])
                start += length
        return made


class PairFilter:
    """Keeps the rows of a stream whose prompt leaves room for an answer, or in which all `whole` answers fit."""

    def __init__(self, most: int, whole: Sequence[str]) -> None:
        self._most, self._whole = most, [f"{name}_ids" for name in whole]

    def __call__(self, row: Mapping[str, Any]) -> bool:
        prompt = len(row[PROMPT])
        if self._whole:
            return all(prompt + len(row[name]) <= self._most for name in self._whole)
        return prompt < self._most
