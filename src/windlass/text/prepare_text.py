"""Prepare a dataset for training on text: `prepare_text` is the one entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.text.content_key import content_key
from windlass.text.encoder import RowEncoder
from windlass.text.forms import Form, recognise_form
from windlass.text.summary import TextSummary
from windlass.text.tables import is_stream, is_table, table_of
from windlass.text.text_options import TextOptions
from windlass.text.token_rows import TokenRows
from windlass.text.token_store import TokenStore
from windlass.text.worker_pool import BATCH, as_rows, encode

# Fewer rows are prepared before a worker process has imported its packages.
ENOUGH_FOR_WORKERS = 20_000
_MOST_WORKERS = 16
_logger = get_job_logger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A dataset with the columns "input_ids" and "labels".

    Attributes:
        dataset: a `datasets.Dataset` or `IterableDataset` if that was given, else `TokenRows`.
        summary: counts; None for a stream, whose rows are prepared while it is read.
    """

    dataset: Any
    summary: TextSummary | None


def prepare_text(
    dataset: Any,
    tokenizer: Any,
    options: TextOptions | None = None,
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> PreparedText:
    """Tokenize a dataset of any known form, and give each token its label.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a sequence of mappings.
        tokenizer: a `transformers` tokenizer.
        options: see `TextOptions`.
        cache: folder in which the result is kept, and looked for; of several processes that share it one prepares, and
            the others wait. None = nothing is kept. See `default_cache`.
        progress: called with the rows done and the rows of the dataset.

    Raises:
        ConfigError: the options do not apply to the form of the dataset.
        DataError: the columns fit no form, a row is invalid (with its number), or no row has a token to train on.
    """
    options = options or TextOptions()
    if is_stream(dataset):
        return PreparedText(_prepared_stream(dataset, tokenizer, options), None)
    if not len(dataset):
        raise DataError("the dataset has no rows")
    if is_table(dataset) and dataset.format["type"] == "custom":
        raise DataError(
            "the dataset has a transform (Dataset.with_transform), whose result may differ between two passes. Apply "
            "it with Dataset.map, or skip the preparation: dataset_kwargs={'skip_prepare_dataset': True}"
        )
    plain, form = _formed(dataset, options)
    example = plain[0]
    encoder = RowEncoder(tokenizer, options, form, example)

    def prepared() -> tuple[TokenRows, TextSummary]:
        return _encoded(plain, encoder, _workers(len(plain), options), progress)

    key = content_key(plain, tokenizer, options) if cache is not None else None
    rows, summary = (
        prepared() if key is None else TokenStore(Path(str(cache)).expanduser()).get(key, prepared)
    )
    _report(summary)
    return PreparedText(table_of(rows) if is_table(dataset) else rows, summary)


def _formed(dataset: Any, options: TextOptions) -> tuple[Any, Form]:
    """The dataset with the columns that its form needs, and the form; formatted rows are rows of text."""
    example = next(iter(dataset))
    form = _form_of(example, getattr(dataset, "column_names", None), options)
    if options.formatting_func is not None and form is not Form.TOKENIZED:
        function = (
            options.formatting_func
        )  # here, for a function of the user's script cannot be sent to a worker
        texts = [_formatted(function, row, number) for number, row in enumerate(dataset)]
        return [{options.dataset_text_field: text} for text in texts], form
    if is_table(dataset):
        return dataset.with_format(None), form
    return dataset, form


def _form_of(example: Any, columns: Sequence[str] | None, options: TextOptions) -> Form:
    if not isinstance(example, Mapping):
        raise DataError(f"the rows of the dataset must be mappings, not {type(example).__name__}")
    names = list(columns or example)
    if options.formatting_func is None:
        return recognise_form(names, options.dataset_text_field)
    if "input_ids" in names:
        _logger.warning("formatting_func is ignored: the dataset has a column input_ids, so it is tokenized")
        return Form.TOKENIZED
    return Form.TEXT


def _formatted(function: Callable[[Mapping[str, Any]], str], row: Any, number: int) -> str:
    text = function(row)
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"row {number}: formatting_func must return the text of the row, not {kind}")
    return text


def _workers(rows: int, options: TextOptions) -> int:
    if options.num_proc is not None:
        return options.num_proc
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS) if rows >= ENOUGH_FOR_WORKERS else 1


def _encoded(
    dataset: Any, encoder: RowEncoder, workers: int, progress: Progress | None
) -> tuple[TokenRows, TextSummary]:
    total = len(dataset)
    batches = encode(dataset, encoder, workers, lambda done: progress(done, total) if progress else None)
    rows = TokenRows.joined([batch.rows for batch in batches])
    return rows, TextSummary.of(rows, sum(b.truncated for b in batches), sum(b.dropped for b in batches))


def _report(summary: TextSummary) -> None:
    if not summary.rows:
        raise DataError(
            f"no row has a token to train on: {summary.dropped} rows were dropped, {summary.truncated} rows were "
            "truncated. Raise max_length, keep the end of rows (truncation_mode='keep_end'), or check the masks."
        )
    if summary.dropped:
        total = summary.rows + summary.dropped
        _logger.warning("dropped %d of %d rows, which have no token to train on", summary.dropped, total)


def _prepared_stream(stream: Any, tokenizer: Any, options: TextOptions) -> Any:
    example = next(iter(stream), None)
    if example is None:
        raise DataError("the dataset has no rows")
    form = _form_of(example, stream.column_names, options)
    if options.formatting_func is not None and form is Form.TEXT:
        example = {options.dataset_text_field: _formatted(options.formatting_func, example, 0)}
    encoder = RowEncoder(tokenizer, options, form, example)
    function = options.formatting_func if form is Form.TEXT else None
    return stream.map(
        StreamStep(encoder, function, options.dataset_text_field),
        with_indices=True,
        batched=True,
        batch_size=BATCH,
        remove_columns=list(stream.column_names or example),
    )


class StreamStep:
    """Encodes the batches of a stream, for its `map`. Logs the first rows that it drops."""

    def __init__(self, encoder: RowEncoder, function: Any, text_field: str) -> None:
        self._encoder, self._function, self._text_field = encoder, function, text_field
        self._warned = False

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, Any]:
        rows = as_rows(columns)
        if self._function is not None:
            numbered = zip(rows, numbers, strict=True)
            rows = [{self._text_field: _formatted(self._function, row, number)} for row, number in numbered]
        found = self._encoder(rows, numbers[0])
        if found.dropped and not self._warned:
            self._warned = True
            _logger.warning(
                "dropped %d of the rows %d to %d of the stream, which have no token to train on; further such rows "
                "are dropped without a message",
                found.dropped, numbers[0], numbers[-1],
            )  # fmt: skip
        return {"input_ids": found.input_ids, "labels": found.labels}
