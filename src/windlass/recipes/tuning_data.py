"""The data of supervised fine-tuning by a recipe: its rows, as they are or of a mixture of files, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.core.errors import DataError
from windlass.finetuning.base_model import set_special_tokens
from windlass.finetuning.prepared_text import text_options
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.sft_data import holds_images, trains_on_completions
from windlass.finetuning.templates import take_over_template
from windlass.recipes.arranged_rows import arranged, formats_of
from windlass.recipes.readers import Record, read_records, texts
from windlass.recipes.schema import PLAIN_TEXT, DataSpec, Recipe, RecipeParts, TokenizerTraining, format_of
from windlass.recipes.splits import load_records
from windlass.recipes.tokenizing import WRITER, build_tokenizer
from windlass.text.forms import LocatedRows, RowError, is_conversational_row, recognise_form, standardised
from windlass.text.image_messages import COLUMNS as IMAGES
from windlass.text.mixture import DatasetMixture
from windlass.text.tables import is_stream, open_stream
from windlass.text.text_options import TextOptions

Rows = Sequence[Mapping[str, Any]] | DatasetMixture
# Of a stream, which may have no end: enough text for a tokenizer and a small base.
_FIRST_ROWS = 1000
_WHOLE_TEXTS = (*PLAIN_TEXT, "folder")  # formats of which a file is one text
_KINDS = ("text", "image")  # of parts of messages
# Of a new tokenizer: the name of each role and its text, up to an end token.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """Rows that `windlass data` shows and prepares, and what they are prepared with."""

    rows: LocatedRows
    options: TextOptions


@dataclass(frozen=True, slots=True)
class DataSource:
    """Splits by name."""

    splits: dict[str, SourceSplit]
    tokenizer: Any  # None if none was named


def load_tuning_data(recipe: Recipe, seed: int, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read the data of a recipe for task sft as `SFTTrainer` takes it, and load or train its tokenizer; see
    `Task.build_parts`.
    """
    data = recipe.data
    if data.streaming:
        return _open_stream(recipe, saved_tokenizer)
    mixed = data.mixture or [data.train]
    # A row of a table is an example of what the model is to write: cut, it would end before its answer.
    parts = {
        path: load_records(
            replace(data, train=path, mixture=None), seed, cut_texts=format_of(path, data) in _WHOLE_TEXTS
        )
        for path in mixed
    }
    sources = {path: tuning_rows(train, data) for path, (train, _) in parts.items()}
    # One file of evaluation data, or a part of each source.
    held_out = list(parts.values())[:1] if data.eval else parts.values()
    held = tuning_rows([record for _, records in held_out for record in records], data)
    # One dataset is evaluated, and its rows are prepared by the form of the first.
    forms = {tuple(sorted(row)) for row in held}
    if len(parts) > 1 and len(forms) > 1:
        shown = "; ".join(", ".join(form) for form in sorted(forms))
        raise DataError(
            f"the files of data.mixture have different columns ({shown}), and are not evaluated as one dataset: name "
            "data.eval, or set data.eval_fraction=0"
        )
    # A list has no weights: an epoch is all rows of all sources, once.
    weights = data.mixture if isinstance(data.mixture, dict) else None
    train = DatasetMixture(sources, weights, seed) if data.mixture else sources[data.train]
    tokenizer = tuning_tokenizer(recipe, train, saved_tokenizer)
    return RecipeParts(recipe, tokenizer, train, held or None, resumed=saved_tokenizer is not None)


def _open_stream(recipe: Recipe, saved_tokenizer: Path | None) -> RecipeParts:
    data = recipe.data
    rows = open_stream(data.train, format_of(data.train, data) or "", data.subset, data.split)
    held = LocatedRows([], [])
    if data.eval is not None or data.eval_split is not None:
        source, split = data.eval or data.train, data.eval_split or data.split
        held = tuning_rows(read_records(source, data, split), data)
    elif data.eval_rows is not None:
        first = list(rows.take(data.eval_rows))
        held = LocatedRows(first, (f"{data.train}: row {row}" for row in range(1, len(first) + 1)))
        rows = rows.skip(data.eval_rows)
    if data.max_samples is not None:
        rows = rows.take(data.max_samples)
    if next(iter(rows), None) is None:
        held_out = "" if data.eval_rows is None else f" beside the {data.eval_rows} of data.eval_rows"
        raise DataError(f"{data.train}: the stream has no rows{held_out}")
    tokenizer = tuning_tokenizer(recipe, rows, saved_tokenizer)
    return RecipeParts(recipe, tokenizer, rows, held or None, resumed=saved_tokenizer is not None)


def first_rows(rows: Any) -> Any:
    """Return the rows that a new tokenizer and a base are trained on: of a stream those at its beginning."""
    return rows.take(_FIRST_ROWS) if is_stream(rows) else rows


def tuning_tokenizer(recipe: Recipe, rows: Any, saved: Path | None) -> Any:
    """Return the tokenizer of the model, or a new one for a base that is trained first.

    A named model has its own, so that a recipe with sections on the base can be used on it.
    """
    spec, column = recipe.tokenizer, recipe.data.text_column
    builds_base = recipe.model.name is None and spec.name is None
    training = (spec.train or TokenizerTraining()) if builds_base else None
    recipe = replace(recipe, tokenizer=replace(spec, train=training))
    tokenizer = build_tokenizer(recipe, WRITER, tuning_texts(first_rows(rows), column), saved)
    if builds_base and tokenizer.chat_template is None and takes_turns(rows, column):
        tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tuning_source(recipe: Recipe, args: SFTConfig) -> DataSource:
    """Return what `SFTTrainer` will prepare, with the same options, so that it finds the result."""
    data = load_tuning_data(recipe, args.seed)
    if holds_images(data.train):
        raise DataError(
            "rows with images are prepared by the run itself, and neither shown nor kept: their images are read each "
            "time"
        )
    if recipe.data.streaming:  # what is shown
        first = list(first_rows(data.train))
        data = replace(data, train=LocatedRows(first, (f"row {row}" for row in range(1, len(first) + 1))))
    take_over_template(args.chat_template_path, data.tokenizer)
    set_special_tokens(data.tokenizer, args)

    def split(rows: Any, packing: bool) -> SourceSplit:
        return SourceSplit(
            rows, text_options(args, packing, trains_on_completions(args, rows, formatted=False))
        )

    sources: Mapping[str, Any] = {"train": data.train}
    if isinstance(data.train, DatasetMixture):
        sources = {f"train {name}": rows for name, rows in data.train.sources.items()}
    splits = {name: split(rows, args.packing) for name, rows in sources.items()}
    if data.evaluation:
        splits["eval"] = split(data.evaluation, args.packs_evaluation)
    return DataSource(splits, data.tokenizer)


def tuning_rows(records: Sequence[Record], data: DataSpec) -> LocatedRows:
    """Return the rows to tune on: prompts with completions if the recipe names their columns, else rows as they are."""
    places = [where for where, _ in records]
    if data.rename or data.messages or data.prompt_format:
        records = [(where, arranged(where, values, data)) for where, values in records]
    prompt = "prompt" if formats_of(data) else data.prompt_column
    if prompt is None or data.completion_column is None:
        return LocatedRows((values for _, values in records), places)
    prompts, answers = (texts(list(records), name) for name in (prompt, data.completion_column))
    pairs = zip(records, prompts, answers, strict=True)
    return LocatedRows((_pair(row, prompt, answer, data) for (_, row), prompt, answer in pairs), places)


def _pair(row: Mapping[str, Any], prompt: str, answer: str, data: DataSpec) -> dict[str, Any]:
    """A prompt with its completion; as messages if the row has images, which go before the prompt."""
    images = {name: row[name] for name in IMAGES if name in row}
    if not images:
        return {"prompt": ended_prompt(prompt, data), "completion": answer}
    said = {"prompt": ("user", prompt), "completion": ("assistant", answer)}
    return {**{name: [{"role": role, "content": text}] for name, (role, text) in said.items()}, **images}


def ended_prompt(prompt: str, data: DataSpec) -> str:
    """Return a prompt as a model reads it: one of a named column that does not end with a blank is ended by a line
    feed, so that its last token is the same without the completion.
    """
    return prompt if data.prompt_column is None or prompt[-1:].isspace() else f"{prompt}\n"


def tuning_texts(rows: Any, text_column: str) -> Iterator[str]:
    """Yield the whole text of each row, for a tokenizer and a base that are trained on them. Raises DataError for rows
    without text, with the place of the row if `rows` know it.
    """
    for number, row in enumerate(rows):
        if "input_ids" in row:
            have = ", ".join(map(str, row))
            raise DataError(
                f"rows with the columns {have} need a model with its tokenizer: set model.name. A new tokenizer and a "
                f"small base are trained on text alone (data.text_column is {text_column!r})"
            )
        found = _standard(rows, number, row, text_column)
        parts = found.get("messages") or [found.get(name, "") for name in ("text", "prompt", "completion")]
        yield "".join(_words(part) for part in parts)


def _standard(rows: Any, number: int, row: Mapping[str, Any], text_column: str) -> dict[str, Any]:
    """The row of this number in its standard form. Raises DataError with its place if `rows` know it."""
    try:
        form = recognise_form(row, text_column)
        return standardised(row, form, text_column, has_template=False, kinds=_KINDS)
    except DataError as error:
        if isinstance(rows, DatasetMixture):
            name, number = rows.position(number)
            rows = rows.sources[name]
        raise RowError(number, str(error)).located(rows) from None


def _words(part: Any) -> str:
    """Return a text, or that of one or several messages, a line each."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(_words, part))
    return f"{_words(part.get('text') or part.get('content') or '')}\n"


def takes_turns(rows: Any, text_column: str) -> bool:
    """Return True if the first row is a conversation."""
    return is_conversational_row(_standard(rows, 0, next(iter(first_rows(rows))), text_column))
