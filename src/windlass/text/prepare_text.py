"""Prepare a dataset for training on text: `prepare_text` is the one entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.text.encoder import EncodedRows, RowEncoder
from windlass.text.forms import Form, recognise_form
from windlass.text.summary import TextSummary
from windlass.text.tables import is_stream, is_table, table_of
from windlass.text.text_options import TextOptions
from windlass.text.token_rows import TokenRows

# Rows tokenized at once: enough for the threads of a fast tokenizer, few enough for the cache.
BATCH = 256
_logger = get_job_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A dataset with the columns "input_ids" and "labels".

    Attributes:
        dataset: a `datasets.Dataset` or `IterableDataset` if that was given, else `TokenRows`.
        summary: counts; None for a stream, whose rows are prepared while it is read.
    """

    dataset: Any
    summary: TextSummary | None


def prepare_text(dataset: Any, tokenizer: Any, options: TextOptions | None = None) -> PreparedText:
    """Tokenize a dataset of any known form, and give each token its label.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a sequence of mappings.
        tokenizer: a `transformers` tokenizer.
        options: see `TextOptions`.

    Raises:
        ConfigError: the options do not apply to the form of the dataset.
        DataError: the columns fit no form, a row is invalid (with its number), or no row has a token to train on.
    """
    options = options or TextOptions()
    if is_stream(dataset):
        return PreparedText(_prepared_stream(dataset, tokenizer, options), None)
    if not len(dataset):
        raise DataError("the dataset has no rows")
    encoder, columns = encoder_of(dataset, tokenizer, options)
    rows, summary = _encoded(encoder, _batches(dataset, columns))
    _report(summary)
    return PreparedText(table_of(rows) if is_table(dataset) else rows, summary)


def encoder_of(dataset: Any, tokenizer: Any, options: TextOptions) -> tuple[RowEncoder, list[str]]:
    """Return the encoder for a dataset, and the columns that the dataset has."""
    example = next(iter(dataset))
    if not isinstance(example, Mapping):
        raise DataError(f"the rows of the dataset must be mappings, not {type(example).__name__}")
    columns = list(getattr(dataset, "column_names", None) or example)
    form = (
        Form.TEXT
        if options.formatting_func is not None
        else recognise_form(columns, options.dataset_text_field)
    )
    if options.formatting_func is not None and "input_ids" in columns:
        _logger.warning("formatting_func is ignored: the dataset has a column input_ids, so it is tokenized")
        form = Form.TOKENIZED
    return RowEncoder(tokenizer, options, form, example), columns


def _encoded(
    encoder: RowEncoder, batches: Iterable[Sequence[Mapping[str, Any]]]
) -> tuple[TokenRows, TextSummary]:
    parts: list[EncodedRows] = []
    first = 0
    for batch in batches:
        parts.append(encoder(batch, first))
        first += len(batch)
    rows = TokenRows.of(parts)
    return rows, TextSummary.of(rows, sum(p.truncated for p in parts), sum(p.dropped for p in parts))


def _batches(dataset: Any, columns: Sequence[str]) -> Iterator[list[Mapping[str, Any]]]:
    for start in range(0, len(dataset), BATCH):
        end = min(start + BATCH, len(dataset))
        if is_table(dataset):
            yield _as_rows(dataset[start:end], columns)
        else:
            yield [dataset[at] for at in range(start, end)]


def _as_rows(columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    return [
        dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True)
    ]


def _report(summary: TextSummary) -> None:
    if not summary.rows:
        raise DataError(
            f"no row has a token to train on: {summary.dropped} rows were dropped, {summary.truncated} rows were "
            "truncated. "
            "Raise max_length, keep the end of rows (truncation_mode='keep_end'), or check the masks."
        )
    if summary.dropped:
        total = summary.rows + summary.dropped
        _logger.warning("dropped %d of %d rows, which have no token to train on", summary.dropped, total)


def _prepared_stream(stream: Any, tokenizer: Any, options: TextOptions) -> Any:
    encoder, columns = encoder_of(stream, tokenizer, options)
    return stream.map(
        StreamStep(encoder), with_indices=True, batched=True, batch_size=BATCH, remove_columns=columns
    )


class StreamStep:
    """Encodes the batches of a stream, for its `map`. Logs the first rows that it drops."""

    def __init__(self, encoder: RowEncoder) -> None:
        self._encoder, self._warned = encoder, False

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, Any]:
        found = self._encoder(_as_rows(columns, list(columns)), numbers[0])
        if found.dropped and not self._warned:
            self._warned = True
            last = numbers[-1]
            _logger.warning(
                "dropped %d of the rows %d to %d of the stream, which have no token to train on; further such rows "
                "are dropped without a message",
                found.dropped, numbers[0], last,
            )  # fmt: skip
        return {"input_ids": found.input_ids, "labels": found.labels}
