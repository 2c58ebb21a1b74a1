"""From a checked recipe to a `Trainer` with everything in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from windlass.callbacks.report import ReportCallback
from windlass.checkpoint.store import Store
from windlass.cli.modelling import build_model
from windlass.cli.readers import Record, texts
from windlass.cli.samples import Blocks, LabelledTexts, encode_labelled, pack
from windlass.cli.schema import Recipe
from windlass.cli.splits import label_ids, label_names, load_records
from windlass.cli.tokenizing import build_tokenizer
from windlass.cli.training import run_folder
from windlass.config.arguments import TrainingArguments
from windlass.core.rng import set_seed
from windlass.core.types import EvalPrediction
from windlass.data.collators import DataCollatorWithPadding, default_data_collator

Dataset = Blocks | LabelledTexts


@dataclass(frozen=True, slots=True)
class RecipeParts:
    """What a recipe comes to: tokenizer and data, ready for training; `evaluation` is None where none is asked for."""

    recipe: Recipe
    tokenizer: Any
    train: Dataset
    evaluation: Dataset | None
    labels: list[str]


def build_parts(recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read and encode the data of `recipe`.

    Args:
        saved_tokenizer: checkpoint of this run that holds its tokenizer, when resumed.

    Raises:
        DataError, ConfigError, ModelError: naming the file, the line or the key.
    """
    train, held = load_records(recipe, args.seed)
    column = recipe.data.text_column
    tokenizer = build_tokenizer(recipe, texts(train, column), saved_tokenizer)
    labels = label_names(train, recipe.data.label_column) if recipe.task == "classification" else []
    encoded = [_encoded(records, recipe, tokenizer, labels) if records else None for records in (train, held)]
    assert encoded[0] is not None  # a source without records is refused when it is read
    return RecipeParts(recipe, tokenizer, encoded[0], encoded[1], labels)


def _encoded(records: list[Record], recipe: Recipe, tokenizer: Any, labels: list[str]) -> Dataset:
    data = recipe.data
    found = texts(records, data.text_column)
    if recipe.task == "causal-lm":
        return pack(found, tokenizer, data.block_size)
    return encode_labelled(found, label_ids(records, data.label_column, labels), tokenizer, data.max_length)


def saved_tokenizer(folder: Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that a resumed run takes its tokenizer from, or None where that is not a checkpoint with one."""
    if not resume:
        return None
    by_path = isinstance(resume, str) and resume != "auto"
    path = Path(str(resume)) if by_path else Store(folder).newest_verified()[0]
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def build_trainer(parts: RecipeParts, args: TrainingArguments) -> Any:
    """A `Trainer` on fresh weights (seeded by `args.seed`) or those of the named model."""
    from windlass.trainer.trainer import Trainer

    set_seed(args.seed)
    is_classification = parts.recipe.task == "classification"
    trainer = Trainer(
        model=build_model(parts.recipe, parts.tokenizer, parts.labels),
        args=args,
        data_collator=DataCollatorWithPadding(parts.tokenizer)
        if is_classification
        else default_data_collator,
        train_dataset=parts.train,
        eval_dataset=parts.evaluation,
        processing_class=parts.tokenizer,
        compute_metrics=accuracy if is_classification else None,
        preprocess_logits_for_metrics=_choice if is_classification else None,
    )
    trainer.add_callback(ReportCallback(run_folder(args)))
    return trainer


def _choice(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Only the chosen class leaves the device: all that accuracy needs."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of samples whose chosen class is right."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}
