"""A task on text whose rows are encoded before training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.recipes.modelling import TextShape, build_model, config_of_named, writing_fault
from windlass.recipes.readers import Record, read_records, texts
from windlass.recipes.schema import PLAIN_TEXT, DataSpec, Recipe, RecipeParts
from windlass.recipes.task import Task
from windlass.recipes.tokenizing import TokenizerKind, build_tokenizer


class TextTask(Task):
    """Reads records, trains or loads a tokenizer, and encodes the records with it."""

    model_class: ClassVar[str]  # class of transformers that loads or builds the model
    tokenizer_kind: ClassVar[TokenizerKind]  # what a tokenizer is that is trained for this task
    length_key: ClassVar[str] = "max_length"  # key of `data` with the number of tokens in a sample

    @abstractmethod
    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        """Return a dataset of the samples. Raises DataError for a record without one of the columns."""

    def text_columns(self, data: DataSpec) -> tuple[str, ...]:
        """Return the columns that a new tokenizer is trained on."""
        return (data.text_column,)

    def label_names(self, train: list[Record], data: DataSpec) -> list[str]:
        """Return the names of the classes in the training data."""
        return []

    def implied_config(self, tokenizer: Any) -> dict[str, Any]:
        """Return defaults of a new model's config, besides those of every language model."""
        return {}

    # --- as for every task --------------------------------------------------------------------------------------------

    def file_problem(self, kind: str) -> str | None:
        if kind != "txt" or kind in self.own_formats:
            return None
        also = "parallel" if "parallel" in self.own_formats else "folder"
        return f"a txt file has no labels; {self.name} reads jsonl, csv, tsv, parquet, {also} or hub"

    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        from windlass.recipes.splits import load_records

        name = recipe.model.name  # a config of the recipe's own was checked when it was read
        if self.writes and name is not None and (fault := writing_fault(config_of_named(name))):
            raise ConfigError(Problem("model.name", name, fault))
        data = recipe.data
        train, held = load_records(data, args.seed, cut_texts=PLAIN_TEXT[0] in self.own_formats)
        text = [text for column in self.text_columns(data) for text in texts(train, column)]
        tokenizer = build_tokenizer(recipe, self.tokenizer_kind, text, saved_tokenizer)
        # Of the training data alone: classes that only the evaluation has are reported as unknown.
        labels = self.label_names(train, data)
        test = []
        if data.test is not None or data.test_split is not None:
            test = read_records(data.test or data.train, data, data.test_split or data.split)
        samples, evaluation, tested = (
            self.encode(records, data, tokenizer, labels) if records else None
            for records in (train, held, test)
        )
        return RecipeParts(recipe, tokenizer, samples, evaluation, labels, tested)

    def build_model(self, parts: RecipeParts) -> Any:
        length = getattr(parts.recipe.data, self.length_key)
        text = TextShape(parts.tokenizer, length, f"data.{self.length_key}")
        implied = self.implied_config(parts.tokenizer)
        model = build_model(parts.recipe.model, self.model_class, parts.labels, implied, text)
        if getattr(model.config, "pad_token_id", None) is None:
            # A head for classes finds the last token of a text before the padding.
            model.config.pad_token_id = parts.tokenizer.pad_token_id
        return model
