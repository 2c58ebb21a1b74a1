"""Preferences by a recipe: the rows, the tokenizer, and the trainer of a named model or of a small base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windlass.cli.arranged_rows import arranged
from windlass.cli.fine_tuning import base_of, build_adapter, tuned_trainer
from windlass.cli.modelling import check_model_type
from windlass.cli.readers import Record
from windlass.cli.schema import DataSpec, Recipe, RecipeParts
from windlass.cli.splits import load_records
from windlass.cli.tuning_data import takes_turns, tuning_tokenizer
from windlass.config.arguments import TrainingArguments
from windlass.text.forms import LocatedRows


def load_preferences(recipe: Recipe, seed: int, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read the rows of a recipe, and load or train its tokenizer. Raises DataError, ConfigError or ModelError, with the
    file, the line or the key.

    Args:
        seed: of what is held out.
        saved_tokenizer: checkpoint with the tokenizer of a resumed run.
    """
    train, held = (_rows(found, recipe.data) for found in load_records(recipe.data, seed, cut_texts=False))
    chosen = chosen_answers(train)
    tokenizer = tuning_tokenizer(recipe, chosen, saved_tokenizer)
    turns = takes_turns(chosen, recipe.data.text_column) if chosen else False
    return RecipeParts(recipe, tokenizer, train, held or None, takes_turns=turns)


def _rows(records: Sequence[Record], data: DataSpec) -> LocatedRows:
    if data.rename:
        records = [(where, arranged(where, values, data)) for where, values in records]
    return LocatedRows((values for _, values in records), [where for where, _ in records])


def chosen_answers(rows: LocatedRows) -> LocatedRows:
    """The chosen answers with their prompts, in the forms of fine-tuning; rows without one are left out, for their
    trainer names them.
    """
    found = list(_chosen(rows))
    return LocatedRows([row for row, _ in found], [place for _, place in found])


def _chosen(rows: LocatedRows) -> Iterator[tuple[dict[str, Any], str]]:
    for row, place in zip(rows, rows.places, strict=True):
        prompt, chosen = row.get("prompt"), row.get("chosen", row.get("completion"))
        if type(prompt) is type(chosen) and isinstance(chosen, (str, list)):
            yield {"prompt": prompt, "completion": chosen}, place
        elif isinstance(chosen, list):
            yield {"messages": chosen}, place
        elif isinstance(chosen, str):
            yield {"prompt": "", "completion": chosen}, place


def build_preference_trainer(
    kind: Any, parts: RecipeParts, args: TrainingArguments, adapter_task: str
) -> Any:
    """Return a trainer of the class `kind` for the recipe's model, or for a base that is trained now, unless it was
    before.

    Args:
        adapter_task: what peft calls the task of the model.
    """
    from windlass.finetuning.tuning_config import TuningConfig

    assert isinstance(args, TuningConfig)
    recipe = parts.recipe
    check_model_type(recipe.model)
    name: Any = recipe.model.name
    if name is None:
        name = base_of(
            parts,
            args,
            chosen_answers(parts.train),
            lambda tokenizer, limits: kind.preparation(args, tokenizer, limits).prepare,
        )
    adapter = build_adapter(recipe)
    if adapter is not None and "task_type" not in (recipe.adapter or {}):
        adapter.task_type = adapter_task
    return tuned_trainer(kind, name, parts, args, adapter, parts.tokenizer)
