"""The data of the task sft: its rows, as they are or of a mixture of files, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.cli.readers import Record, texts
from windlass.cli.schema import DataSpec, Recipe
from windlass.cli.splits import load_records
from windlass.cli.tokenizing import build_tokenizer
from windlass.core.errors import DataError
from windlass.text.located_rows import LocatedRows
from windlass.text.mixture import DatasetMixture

Rows = Sequence[Mapping[str, Any]] | DatasetMixture


@dataclass(frozen=True, slots=True)
class TuningData:
    """The rows to tune on and to evaluate on, as `SFTTrainer` takes them; `evaluation` is None without any."""

    tokenizer: Any
    train: Rows
    evaluation: LocatedRows | None


def load_tuning_data(recipe: Recipe, seed: int, saved_tokenizer: Path | None = None) -> TuningData:
    """Read the data of a recipe for task sft, and load or train its tokenizer.

    Args:
        seed: of what is held out, and of the order of a mixture.
        saved_tokenizer: checkpoint with the tokenizer of a resumed run.

    Raises:
        DataError, ConfigError, ModelError: with the file, the line or the key.
    """
    data = recipe.data
    mixed = data.mixture or {data.train: 1.0}
    parts = {
        path: load_records(replace(recipe, data=replace(data, train=path, mixture=None)), seed)
        for path in mixed
    }
    sources = {path: tuning_rows(train, data) for path, (train, _) in parts.items()}
    # One file of evaluation data, or a part of each source.
    held_out = list(parts.values())[:1] if data.eval else parts.values()
    held = tuning_rows([record for _, records in held_out for record in records], data)
    forms = {tuple(sorted(row)) for row in held}
    if len(parts) > 1 and len(forms) > 1:
        shown = "; ".join(", ".join(form) for form in sorted(forms))
        raise DataError(
            f"the files of data.mixture have different columns ({shown}), and are not evaluated as one dataset: name "
            "data.eval, or set data.eval_fraction=0"
        )
    train = DatasetMixture(sources, mixed, seed) if data.mixture else sources[data.train]
    tokenizer = build_tokenizer(recipe, tuning_texts(train, data.text_column), saved_tokenizer)
    return TuningData(tokenizer, train, held or None)


def tuning_rows(records: Sequence[Record], data: DataSpec) -> LocatedRows:
    """Return the rows to tune on: prompts with completions if the recipe names their columns, else rows as they are.

    A prompt that does not end with a blank is ended by a line feed, so that its last token is the same without the
    completion.
    """
    places = [where for where, _ in records]
    if data.prompt_column is None or data.completion_column is None:
        return LocatedRows((values for _, values in records), places)
    prompts, answers = (texts(list(records), name) for name in (data.prompt_column, data.completion_column))
    rows = [
        {"prompt": prompt if prompt[-1:].isspace() else f"{prompt}\n", "completion": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return LocatedRows(rows, places)


def tuning_texts(rows: Rows, text_column: str) -> Iterator[str]:
    """Yield the whole text of each row, for a tokenizer and a base that are trained on them. Raises DataError for rows
    of another form, such as conversations.
    """
    for row in rows:
        text = row["prompt"] + row["completion"] if "prompt" in row else row.get(text_column)
        if not isinstance(text, str):
            have = ", ".join(map(str, row))
            raise DataError(
                f"rows with the columns {have} need a model with its tokenizer: set model.name. A new tokenizer and a "
                f"small base are trained on text alone (data.text_column is {text_column!r})"
            )
        yield text
