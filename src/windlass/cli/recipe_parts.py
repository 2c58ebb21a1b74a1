"""Build the parts of a checked recipe and its `Trainer`, and generate text with its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.callbacks.report import ReportCallback
from windlass.checkpoint.store import Store
from windlass.cli.fine_tuning import build_sft_trainer, tuning_rows, tuning_texts
from windlass.cli.modelling import build_model
from windlass.cli.readers import Record, texts
from windlass.cli.samples import Blocks, LabelledTexts, encode_labelled, pack
from windlass.cli.schema import Recipe
from windlass.cli.splits import label_ids, label_names, load_records
from windlass.cli.tokenizing import build_tokenizer
from windlass.cli.training import run_folder
from windlass.config.arguments import TrainingArguments
from windlass.core.rng import preserved_rng, set_seed
from windlass.core.types import EvalPrediction
from windlass.data.collators import DataCollatorWithPadding, default_data_collator

Dataset = Blocks | LabelledTexts | list[dict[str, Any]]
# Of the texts generated before and after training, so that only the training differs.
SEED = 0


@dataclass(frozen=True, slots=True)
class RecipeParts:
    """Tokenizer and data of a recipe; `evaluation` is None without evaluation."""

    recipe: Recipe
    tokenizer: Any
    train: Dataset
    evaluation: Dataset | None
    labels: list[str]


def build_parts(recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read and encode the data of `recipe`.

    Args:
        saved_tokenizer: checkpoint with the tokenizer of a resumed run.

    Raises:
        DataError, ConfigError, ModelError: with the file, the line or the key.
    """
    train, held = load_records(recipe, args.seed)
    if recipe.task == "sft":
        tokenizer = build_tokenizer(recipe, tuning_texts(train, recipe.data), saved_tokenizer)
        rows, held_rows = tuning_rows(train, recipe.data), tuning_rows(held, recipe.data)
        return RecipeParts(recipe, tokenizer, rows, held_rows or None, [])
    column = recipe.data.text_column
    tokenizer = build_tokenizer(recipe, texts(train, column), saved_tokenizer)
    labels = label_names(train, recipe.data.label_column) if recipe.task == "classification" else []
    encoded = [_encoded(records, recipe, tokenizer, labels) if records else None for records in (train, held)]
    assert encoded[0] is not None  # a source without records is an error
    return RecipeParts(recipe, tokenizer, encoded[0], encoded[1], labels)


def _encoded(records: list[Record], recipe: Recipe, tokenizer: Any, labels: list[str]) -> Dataset:
    data = recipe.data
    found = texts(records, data.text_column)
    if recipe.task == "causal-lm":
        return pack(found, tokenizer, data.block_size)
    return encode_labelled(found, label_ids(records, data.label_column, labels), tokenizer, data.max_length)


def saved_tokenizer(folder: Path, resume: bool | str | None) -> Path | None:
    """Return the checkpoint with the tokenizer of a resumed run, or None if it has none."""
    if not resume:
        return None
    by_path = isinstance(resume, str) and resume != "auto"
    path = Path(str(resume)) if by_path else Store(folder).newest_verified()[0]
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def build_trainer(parts: RecipeParts, args: TrainingArguments) -> Any:
    """Return a `Trainer` with new weights (seeded by `args.seed`) or those of the named model; for the task sft an
    `SFTTrainer`.
    """
    from windlass.trainer.trainer import Trainer

    if parts.recipe.task == "sft":
        tuner = build_sft_trainer(parts.recipe, parts.tokenizer, parts.train, parts.evaluation, args)
        tuner.add_callback(ReportCallback(run_folder(args)))
        return tuner
    set_seed(args.seed)
    is_classification = parts.recipe.task == "classification"
    collator = DataCollatorWithPadding(parts.tokenizer) if is_classification else default_data_collator
    trainer = Trainer(
        model=build_model(parts.recipe, parts.tokenizer, parts.labels),
        args=args,
        data_collator=collator,
        train_dataset=parts.train,
        eval_dataset=parts.evaluation,
        processing_class=parts.tokenizer,
        compute_metrics=accuracy if is_classification else None,
        preprocess_logits_for_metrics=_predicted_class if is_classification else None,
    )
    trainer.add_callback(ReportCallback(run_folder(args)))
    return trainer


def _predicted_class(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Reduce logits to the predicted class on the device, for the accuracy."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of correct predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def continue_prompt(parts: RecipeParts, model: Any) -> str | None:
    """Return `sample.prompt` continued by `model`, on one line; None if there is no prompt."""
    sample = parts.recipe.sample
    if not sample.prompt:
        return None
    device = next(model.parameters()).device
    prompt = parts.tokenizer(sample.prompt, return_tensors="pt", add_special_tokens=False).to(device)
    room = getattr(model.config, "max_position_embeddings", None)
    most = sample.max_new_tokens
    if room is not None:
        most = min(most, room - prompt["input_ids"].shape[1])
    if most < 1:
        return None
    choice: dict[str, Any] = {"do_sample": False}
    if sample.temperature:
        choice = {"do_sample": True, "temperature": sample.temperature, "top_k": 0}
    was_training = model.training
    model.eval()
    with preserved_rng(device), torch.no_grad():
        torch.manual_seed(SEED)
        ids = model.generate(
            **prompt, max_new_tokens=most, pad_token_id=parts.tokenizer.pad_token_id, **choice
        )
    model.train(was_training)
    return " ".join(parts.tokenizer.decode(ids[0], skip_special_tokens=True).split())
