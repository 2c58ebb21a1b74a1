"""Prepare a dataset for training on text: `prepare_text` is the one entry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from windlass.core.errors import DataError, OutdatedDependencyError
from windlass.core.logs import get_job_logger
from windlass.core.optional import version_of
from windlass.core.threads import usable_cores
from windlass.core.types import IGNORED
from windlass.text.encoder import RowEncoder
from windlass.text.forms import Form, RowError, recognise_form, shown_places
from windlass.text.image_encoder import ImageRowEncoder
from windlass.text.image_processing import ImageProcessing
from windlass.text.image_rows import ImageRows
from windlass.text.packing import pack_dataset, pack_rows
from windlass.text.summary import TextSummary
from windlass.text.tables import StoredRows, first_of, is_stream, is_table, table_bytes, table_of
from windlass.text.text_options import TextOptions
from windlass.text.token_rows import TokenRows
from windlass.text.token_store import Prepared, TokenStore, kept
from windlass.text.worker_pool import as_rows, encode, in_batches

# Fewer rows are prepared before a worker process has imported its packages.
ENOUGH_FOR_WORKERS = 50_000
_MOST_WORKERS = 16
_logger = get_job_logger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A dataset with the columns "input_ids" and "labels".

    Attributes:
        dataset: a `datasets.Dataset` or `IterableDataset` if that was given, else `TokenRows`; `ImageRows` if rows may
            have images. Packed rows have the column "seq_lengths" too, unless the strategy is "wrapped".
        summary: counts; None for a stream, whose rows are prepared while it is read.
    """

    dataset: Any
    summary: TextSummary | None


def prepare_text(
    dataset: Any,
    tokenizer: Any,
    options: TextOptions | None = None,
    *,
    images: ImageProcessing | None = None,
    cache: TokenStore | str | Path | None = None,
    progress: Progress | None = None,
) -> PreparedText:
    """Tokenize a dataset of any known form, give each token its label, and pack the rows if the options ask for it.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, or a sequence of mappings.
        tokenizer: a `transformers` tokenizer.
        options: see `TextOptions`.
        images: rows may have images, which are processed so. Their sizes are read, so each must open; nothing is kept
            in the cache. None = text alone.
        cache: folder in which the result is kept, and looked for; of several processes that share it one prepares, and
            the others wait. None = nothing is kept. See `default_cache`.
        progress: called with the rows done and the rows of the dataset.

    Raises:
        ConfigError: the options do not apply to the form of the dataset.
        DataError: the columns fit no form, a row is invalid (with its number), or no row has a token to train on.
    """
    options = options or TextOptions()
    if is_stream(dataset):
        return PreparedText(_prepared_stream(dataset, tokenizer, options, images), None)
    refuse_passing(dataset)
    if not len(dataset):
        raise DataError("the dataset has no rows")
    if is_table(dataset) and dataset.format["type"] == "custom":
        raise DataError(
            "the dataset has a transform (Dataset.with_transform), whose result may differ between two passes. Apply "
            "it with Dataset.map, or skip the preparation: dataset_kwargs={'skip_prepare_dataset': True}"
        )
    if images is not None:
        return _with_images(dataset, images, options, progress)
    try:
        rows, summary = _prepared(dataset, tokenizer, options, cache, progress)
    except RowError as error:
        raise error.located(dataset) from None
    _report(summary, dataset)
    return PreparedText(table_of(rows) if is_table(dataset) else rows, summary)


def refuse_passing(dataset: Any) -> None:
    """Raise DataError for a generator and the like, whose rows are gone once they are read."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"rows of a {type(dataset).__name__} have no numbers; pass a list, a datasets.Dataset, or "
            "datasets.IterableDataset.from_generator(function)"
        )


def _prepared(
    dataset: Any,
    tokenizer: Any,
    options: TextOptions,
    cache: TokenStore | str | Path | None,
    progress: Progress | None,
) -> Prepared:
    plain, form = _formed(dataset, options)
    encoder = RowEncoder(tokenizer, options.of_tokens(), form, plain[0])
    key = None if cache is None else content_key(plain, tokenizer, options.of_tokens())

    def tokens() -> Prepared:
        # Tokens and packed rows have separate entries: another packing of the same text tokenizes nothing.
        return kept(cache, key, lambda: _encoded(plain, encoder, _workers(len(plain), options), progress))

    if options.packing is None:
        return tokens()
    return kept(cache, _packed_key(key, options), lambda: _packed(tokens(), options))


def _with_images(
    dataset: Any, images: ImageProcessing, options: TextOptions, progress: Progress | None
) -> PreparedText:
    """Prepare rows that may have images."""
    try:
        plain, form = _formed(StoredRows(dataset) if is_table(dataset) else dataset, options)
        encoder = ImageRowEncoder(images, options.of_tokens(), form, plain[0])
        prepared = _encoded(plain, encoder, options.num_proc or 1, progress)
        _report(prepared[1], dataset)
        if options.packing is not None:
            prepared = _packed(prepared, options)
    except RowError as error:
        raise error.located(dataset) from None
    return PreparedText(ImageRows(prepared[0], encoder, plain), prepared[1])


def _packed_key(key: str | None, options: TextOptions) -> str | None:
    if key is None:
        return None
    settings = [key, options.packing, options.max_length, options.shuffle_seed]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _packed(tokens: Prepared, options: TextOptions) -> Prepared:
    rows, summary = tokens
    assert options.packing is not None
    assert options.max_length is not None
    ordered = rows if options.shuffle_seed is None else rows.shuffle(options.shuffle_seed)
    packed = pack_rows(ordered, options.max_length, options.packing)
    return packed, replace(summary, packed_rows=len(packed))


def _formed(dataset: Any, options: TextOptions) -> tuple[Any, Form]:
    """The dataset with the columns that its form needs, and the form; formatted rows are rows of text."""
    example = next(iter(dataset))
    form = _form_of(example, getattr(dataset, "column_names", None), options)
    if options.formatting_func is not None and form is not Form.TOKENIZED:
        # Called in this process: a function defined in the user's script cannot be sent to a worker.
        function = options.formatting_func
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
        raise RowError(number, f"formatting_func must return the text of the row, not {kind}")
    return text


def _workers(rows: int, options: TextOptions) -> int:
    if options.num_proc is not None:
        return options.num_proc
    return min(usable_cores(), _MOST_WORKERS) if rows >= ENOUGH_FOR_WORKERS else 1


def _encoded(
    dataset: Any, encoder: RowEncoder, workers: int, progress: Progress | None
) -> tuple[TokenRows, TextSummary]:
    total = len(dataset)
    batches = encode(dataset, encoder, workers, lambda done: progress(done, total) if progress else None)
    rows = TokenRows.joined([batch.rows for batch in batches])
    _check_targets(rows)
    dropped = [number for batch in batches for number in batch.dropped]
    return rows, TextSummary.of(rows, sum(b.truncated for b in batches), dropped)


def _check_targets(rows: TokenRows) -> None:
    """Refuse rows of one token each: the first token of a row is predicted from nothing."""
    labels = rows.flat["labels"]
    if len(rows) and np.count_nonzero(labels != IGNORED) == np.count_nonzero(
        labels[rows.offsets[:-1]] != IGNORED
    ):
        raise DataError(
            f"none of the {len(rows)} rows has a token to train on after its first one, which nothing predicts. "
            "Check the columns, the masks and max_length."
        )


def _report(summary: TextSummary, dataset: Any) -> None:
    if not summary.rows:
        raise DataError(
            f"no row has a token to train on: {summary.dropped} rows were dropped, {summary.truncated} rows were "
            "truncated. Raise max_length, or check the masks."
        )
    if summary.dropped:
        total = summary.rows + summary.dropped
        _logger.warning(
            "dropped %d of %d rows, which have no token to train on: %s",
            summary.dropped,
            total,
            shown_places(dataset, summary.dropped_rows, summary.dropped),
        )


def _prepared_stream(
    stream: Any, tokenizer: Any, options: TextOptions, images: ImageProcessing | None
) -> Any:
    if images is not None:
        if options.packing is not None:
            fix = (
                "a stream with images is not packed: set packing=False, or load the dataset (streaming=False)"
            )
            raise DataError(fix)
        stream = _undecoded(stream) if stream.features else stream
    example = first_of(stream)
    form = _form_of(example, stream.column_names, options)
    if options.formatting_func is not None and form is Form.TEXT:
        example = {options.dataset_text_field: _formatted(options.formatting_func, example, 0)}
    of_tokens = options.of_tokens()
    encoder = (
        RowEncoder(tokenizer, of_tokens, form, example)
        if images is None
        else ImageRowEncoder(images, of_tokens, form, example)
    )
    function = options.formatting_func if form is Form.TEXT else None
    step = StreamStep(encoder, function, options.dataset_text_field, stream.features)
    tokens = in_batches(stream, step, example, encoder.made)
    if options.shuffle_seed is not None:
        tokens = tokens.shuffle(seed=options.shuffle_seed)
    if options.packing is None:
        return tokens
    assert options.max_length is not None
    return pack_dataset(tokens, options.max_length, options.packing)


def _undecoded(stream: Any) -> Any:
    """The stream with images as the collator opens them: files, or their bytes."""
    if not hasattr(stream, "decode"):
        command = 'pip install --upgrade "datasets>=3.4"'
        raise OutdatedDependencyError("datasets", version_of("datasets") or "", "3.4", command)
    return stream.decode(False)


class StreamStep:
    """Encodes the batches of a stream, for its `map`. Logs the first rows that it drops."""

    def __init__(self, encoder: RowEncoder, function: Any, text_field: str, features: Any) -> None:
        self._encoder, self._function, self._text_field = encoder, function, text_field
        self._features = features
        self._warned = False

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, Any]:
        rows = as_rows(columns, self._features)
        if self._function is not None:
            numbered = zip(rows, numbers, strict=True)
            rows = [{self._text_field: _formatted(self._function, row, number)} for row, number in numbered]
        found = self._encoder(rows, numbers[0])
        if found.dropped and not self._warned:
            self._warned = True
            _logger.warning(
                "dropped %d of the rows %d to %d of the stream, which have no token to train on; further such rows "
                "are dropped without a message",
                len(found.dropped),
                numbers[0],
                numbers[-1],
            )
        return self._encoder.columns(found, rows, numbers[0])


# Read by the preparation, but without influence on its result. The text that a formatting function returns is hashed
# in place of the function.
_WITHOUT_INFLUENCE = ("num_proc", "formatting_func")
_PACKAGES = ("transformers", "tokenizers", "jinja2")


def content_key(dataset: Any, tokenizer: Any, options: TextOptions) -> str | None:
    """Return the SHA-256 of the rows, the tokenizer, the options and the code, in hex.

    None if two datasets or tokenizers cannot be compared: a row holds what has no JSON form, or the tokenizer has code
    that is not of transformers or tokenizers.
    """
    if _has_own_code(tokenizer):
        return None
    digest = hashlib.sha256(_code().encode())
    try:
        for part in _settings(tokenizer, options):
            digest.update(hashlib.sha256(part).digest())
        for piece in table_bytes(dataset) if is_table(dataset) else _rows(dataset):
            digest.update(piece)
    except (TypeError, ValueError, RecursionError):
        return None
    return digest.hexdigest()


def _has_own_code(tokenizer: Any) -> bool:
    """Return True if its class is defined outside transformers, or a method of it was replaced."""
    kind = type(tokenizer)
    is_plain = kind.__module__.partition(".")[0] == "transformers"
    return not is_plain or any(callable(getattr(kind, name, None)) for name in vars(tokenizer))


def _rows(dataset: Iterable[Any]) -> Iterator[bytes]:
    for row in dataset:
        yield json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _settings(tokenizer: Any, options: TextOptions) -> Iterator[bytes]:
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _WITHOUT_INFLUENCE}
    yield json.dumps(given, sort_keys=True, default=repr).encode()
    template = options.chat_template or tokenizer.chat_template
    yield json.dumps(template).encode()
    if "strftime_now" in json.dumps(template):
        yield date.today().isoformat().encode()  # the template writes the date of today into the text
    yield type(tokenizer).__name__.encode()
    yield json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode()
    # A call passes it on to the backend, whose JSON does not have it.
    yield json.dumps(getattr(tokenizer, "split_special_tokens", False)).encode()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        try:
            state = json.loads(backend.to_str())
        except Exception as error:  # of no type of its own
            raise TypeError("a part of the tokenizer is written in Python") from error
        # All that a fast tokenizer encodes with, wherever it was loaded from; but these are what the last call set.
        state = {k: v for k, v in state.items() if k not in ("truncation", "padding")}
        yield json.dumps(state).encode()
        return
    yield json.dumps(tokenizer.init_kwargs, sort_keys=True, default=str).encode()
    yield json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    vocabulary = getattr(tokenizer, "vocab_file", None)
    if vocabulary and Path(vocabulary).is_file():
        yield Path(vocabulary).read_bytes()


@cache
def _code() -> str:
    """The source of this room, and the versions of the packages that it calls."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(sources).hexdigest() + "".join(version_of(name) or "" for name in _PACKAGES)
