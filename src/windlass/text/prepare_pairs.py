"""Prepare a dataset of preferences: `prepare_pairs` is the one entry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.text.forms import RowError, shown_places
from windlass.text.pair_encoder import PROMPT, PairEncoder, PairOptions, PairRows
from windlass.text.prepare_text import content_key
from windlass.text.summary import TextSummary
from windlass.text.tables import first_of, is_stream, is_table
from windlass.text.token_rows import TokenRows
from windlass.text.token_store import Prepared, kept
from windlass.text.worker_pool import as_rows, encode, in_batches

_logger = get_job_logger(__name__)
LABEL = "label"  # if the answer of a row is a desirable one


def prepare_pairs(
    dataset: Any,
    tokenizer: Any,
    options: PairOptions,
    *,
    numbers: Sequence[str] = (),
    cache: str | Path | None = None,
    name: str = "train",
) -> Any:
    """Tokenize a dataset of preferences. What is kept on the disk does not depend on `max_length`.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a sequence of mappings, with the columns of
            `options.answers`, and "prompt" unless all answers begin with it.
        tokenizer: a `transformers` tokenizer.
        numbers: columns of numbers that are taken over if the dataset has them; a row must then have one.
        cache: folder in which the result is kept, and looked for.
        name: of the dataset, for the log.

    Returns:
        `PairRows`; for a stream a stream of rows with the same columns, without those that have nothing to learn within
        `options.max_length`, which are counted in the log.

    Raises:
        ConfigError: the tokenizer has no end token.
        DataError: a row is invalid (with its number, or its place in a file), or there are none.
    """
    if is_stream(dataset):
        return _prepared_stream(dataset, tokenizer, options, numbers, name)
    if not len(dataset):
        raise DataError("the dataset has no rows")
    plain = dataset.with_format(None) if is_table(dataset) else dataset
    # Without `max_length`: rows are cut when a batch is made, so one preparation serves every length.
    plain_options = PairOptions(answers=options.answers, whole=options.whole, eos_token=options.eos_token)
    try:
        encoder = PairEncoder(tokenizer, plain_options, plain[0])
        rows = _tokens(plain, encoder, tokenizer, plain_options, cache, options.num_proc or 1)
        present = _columns(plain) if numbers else set()
        columns = {name: _numbers(plain, name) for name in numbers if name in present}
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
    try:
        fits = _fitting(rows.lengths, rows.kept, options, whole_sequences)
    except RowError as error:
        raise error.located(dataset) from None
    lost = rows.kept[~fits]
    if not len(lost):
        return rows, rows.summary(options, 0)
    shown = shown_places(dataset, lost.tolist(), len(lost))
    message = f"of the {name} dataset have {_what(whole_sequences)} max_length={options.max_length}: {shown}"
    if not fits.any():
        raise DataError(f"all {len(lost)} rows {message}. Raise max_length, or shorten the prompts")
    _logger.warning("dropped %d of %d rows: they %s", len(lost), len(fits), message.partition(" dataset ")[2])
    kept = rows.select(np.flatnonzero(fits))
    return kept, kept.summary(options, len(lost))


def _fitting(lengths: Any, numbers: Any, options: PairOptions, whole: bool) -> Any:
    """Which rows have something to learn within `max_length`, by the tokens of their prompts and answers. Raises
    RowError, with one of `numbers`, for a row that is too long and may not be cut. `whole`: nothing is cut.
    """
    most, longest = options.max_length, lengths[:, 0] + lengths[:, 1:].max(axis=1)
    if most is None or options.truncation_mode == "keep_end":
        return np.ones(len(lengths), dtype=bool)
    if options.truncation_mode == "error" and (longest > most).any():
        at = int(np.flatnonzero(longest > most)[0])
        raise RowError(
            int(numbers[at]),
            f"a prompt with an answer has {longest[at]} tokens, more than max_length={most}, and truncation_mode is "
            '"error". Raise max_length, or set truncation_mode to "keep_start".',
        )
    # A prompt that fills the length leaves no token of the answer, and the loss of such a row has nothing to compare.
    return longest <= most if whole else lengths[:, 0] < most


def _tokens(
    dataset: Any,
    encoder: PairEncoder,
    tokenizer: Any,
    options: PairOptions,
    cache: str | Path | None,
    workers: int,
) -> TokenRows:
    def made() -> Prepared:
        rows = TokenRows.joined([batch.rows for batch in encode(dataset, encoder, workers)])
        return rows, TextSummary.of(rows, 0)

    key = None if cache is None else content_key(dataset, tokenizer, options)
    return kept(cache, key, made)[0]


def _columns(dataset: Any) -> set[str]:
    """The columns of a dataset; of rows that are mappings all that any of them has."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, (list, tuple)):
        return set(names)
    return {column for at in range(len(dataset)) for column in dataset[at]}


def _numbers(dataset: Any, name: str) -> Any:
    """A column of numbers, or of true and false."""
    values = dataset[name] if is_table(dataset) else [row.get(name) for row in dataset]
    return np.asarray([_number(value, name, number) for number, value in enumerate(values)])


def _number(value: Any, name: str, row: int) -> bool | int | float:
    """The value of a column of numbers in a row. Raises RowError if it is something else."""
    # Before the types of Python: a bool of NumPy is not a bool, and its floats below 64 bits are not floats.
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        kind = "is missing or null" if value is None else f"must hold numbers, not {type(value).__name__}"
        raise RowError(row, f"column {name!r} {kind}")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise RowError(row, f"column {name!r} holds a whole number of more than 64 bits")
    # Each such row would make the loss of its batch NaN.
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(row, f"column {name!r} holds {value}, which is not a finite number")
    if name == LABEL and value not in (0, 1):  # -1 is true, for Python and for tensors
        raise RowError(row, f"column {name!r} holds {value}, and must be true (1) or false (0)")
    return value


def _prepared_stream(
    stream: Any, tokenizer: Any, options: PairOptions, numbers: Sequence[str], name: str
) -> Any:
    example = first_of(stream)
    step = PairStep(PairEncoder(tokenizer, options, example), options, stream.features, numbers, name)
    return in_batches(stream, step, example, step.made)


class PairStep:
    """Encodes the batches of a stream, for its `map`, and leaves out rows with nothing to learn within `max_length`.

    What is left out is counted, and logged at the first such row and whenever its number has doubled, by one reader of
    the stream of each process.

    Args:
        features: of the stream's columns, if they are known.
        numbers: columns of numbers that are taken over if the stream has them.
        name: of the dataset, for the log.
    """

    def __init__(
        self, encoder: PairEncoder, options: PairOptions, features: Any, numbers: Sequence[str], name: str
    ) -> None:
        self._encoder, self._options, self._features = encoder, options, features
        self._numbers, self._name = tuple(numbers), name
        self.made = {PROMPT, *(f"{answer}_ids" for answer in options.answers), *numbers}
        self._read = self._dropped = 0
        self._next_message = 1

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, Any]:
        found = self._encoder(as_rows(columns, self._features), numbers[0])
        names = (PROMPT, *(f"{answer}_ids" for answer in self._options.answers))
        taken = [name for name in self._numbers if name in columns]
        made: dict[str, Any] = {name: [] for name in (*names, *taken)}
        dropped = []
        lengths = np.asarray(found.documents).reshape(-1, len(names))
        fits = _fitting(lengths, numbers, self._options, self._options.whole)
        for at, (ids, documents) in enumerate(zip(found.input_ids, found.documents, strict=True)):
            if not fits[at]:
                dropped.append(numbers[at])
                continue
            start = 0
            for name, length in zip(names, documents, strict=True):
                made[name].append(ids[start : start + length])
                start += length
            for name in taken:
                made[name].append(_number(columns[name][at], name, numbers[at]))
        self._count(dropped, numbers[-1] + 1)
        return made

    def _count(self, dropped: list[int], read: int) -> None:
        if read <= self._read:  # an earlier pass had these rows
            return
        self._read, self._dropped = read, self._dropped + len(dropped)
        worker = get_worker_info()
        if self._dropped < self._next_message or (worker is not None and worker.id):
            return
        self._next_message = 2 * self._dropped
        _logger.warning(
            "dropped %d of the first %d rows of the stream (%s dataset): they have %s max_length=%s, as row %d has",
            self._dropped,
            read,
            self._name,
            _what(self._options.whole),
            self._options.max_length,
            dropped[0],
        )


def _what(whole: bool) -> str:
    return "an answer that does not fit into" if whole else "a prompt that fills"
