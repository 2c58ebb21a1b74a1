"""Build the parts of a checked recipe and its `Trainer`, and generate text with its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.callbacks.report import ReportCallback
from windlass.checkpoint.store import Store
from windlass.cli.fine_tuning import build_sft_trainer
from windlass.cli.images import Images, load_images
from windlass.cli.modelling import build_model
from windlass.cli.readers import Record, read_records, texts
from windlass.cli.samples import (
    Blocks,
    LabelledTexts,
    MaskedBlocks,
    encode_labelled,
    encode_pairs,
    pack,
)
from windlass.cli.schema import Recipe
from windlass.cli.splits import label_ids, label_names, load_records
from windlass.cli.text_metrics import SCORES, of_predictions
from windlass.cli.tokenizing import build_tokenizer
from windlass.cli.training import run_folder
from windlass.cli.tuning_data import Rows, load_tuning_data
from windlass.config.arguments import TrainingArguments
from windlass.core.rng import preserved_rng, set_seed
from windlass.core.types import EvalPrediction
from windlass.data.collate_default import default_data_collator
from windlass.data.collate_mlm import DataCollatorForLanguageModeling
from windlass.data.collate_pad import DataCollatorForSeq2Seq, DataCollatorWithPadding
from windlass.finetuning.text_generation import generate

Dataset = Blocks | LabelledTexts | MaskedBlocks | Images | Rows
# Of the texts generated before and after training, so that only the training differs.
SEED = 0


@dataclass(frozen=True, slots=True)
class RecipeParts:
    """Tokenizer (None for images) and data of a recipe; `evaluation` and `test` are None without them."""

    recipe: Recipe
    tokenizer: Any
    train: Dataset
    evaluation: Dataset | None
    labels: list[str]
    test: Dataset | None = None


def build_parts(recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read and encode the data of `recipe`.

    Args:
        saved_tokenizer: checkpoint with the tokenizer of a resumed run.

    Raises:
        DataError, ConfigError, ModelError: with the file, the line or the key.
    """
    if recipe.task == "image-classification":
        images, held_images, labels = load_images(recipe, args.seed)
        return RecipeParts(recipe, None, images, held_images, labels)
    if recipe.task == "sft":
        found = load_tuning_data(recipe, args.seed, saved_tokenizer)
        return RecipeParts(recipe, found.tokenizer, found.train, found.evaluation, [])
    train, held = load_records(recipe, args.seed)
    data = recipe.data
    columns = (data.text_column, data.target_column) if recipe.task == "seq2seq" else (data.text_column,)
    text = [text for column in columns for text in texts(train, column)]
    tokenizer = build_tokenizer(recipe, text, saved_tokenizer)
    labels = label_names(train, recipe.data.label_column) if recipe.task == "classification" else []
    test = read_records(data.test, data) if data.test else []
    first, *rest = (
        _encoded(records, recipe, tokenizer, labels) if records else None for records in (train, held, test)
    )
    assert first is not None  # a source without records is an error
    return RecipeParts(recipe, tokenizer, first, rest[0], labels, rest[1])


def _encoded(records: list[Record], recipe: Recipe, tokenizer: Any, labels: list[str]) -> Dataset:
    data = recipe.data
    found = texts(records, data.text_column)
    if recipe.task == "causal-lm":
        return pack(found, tokenizer, data.block_size)
    if recipe.task == "masked-lm":
        return MaskedBlocks(pack(found, tokenizer, data.block_size))
    if recipe.task == "seq2seq":
        return encode_pairs(found, texts(records, data.target_column), tokenizer, data.max_length)
    return encode_labelled(found, label_ids(records, data.label_column, labels), tokenizer, data.max_length)


def saved_tokenizer(folder: Path, resume: bool | str | None) -> Path | None:
    """Return the checkpoint with the tokenizer of a resumed run, or None if it has none."""
    if not resume:
        return None
    by_path = isinstance(resume, str) and resume != "auto"
    path = Path(str(resume)) if by_path else Store(folder).newest_verified()[0]
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def build_trainer(parts: RecipeParts, args: TrainingArguments) -> Any:
    """Return a `Trainer` with new weights (seeded by `args.seed`) or those of the named model; for the tasks sft and
    seq2seq their own.
    """
    from windlass.finetuning.seq2seq_trainer import Seq2SeqTrainer
    from windlass.trainer.trainer import Trainer

    if parts.recipe.task == "sft":
        tuner = build_sft_trainer(parts.recipe, parts.tokenizer, parts.train, parts.evaluation, args)
        tuner.add_callback(ReportCallback(run_folder(args), {"data": tuner.data_facts()}))
        return tuner
    set_seed(args.seed)
    recipe = parts.recipe
    shape = parts.train.shape if isinstance(parts.train, Images) else None
    model = build_model(recipe, parts.tokenizer, parts.labels, shape)
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = accuracy if parts.labels else None
    if recipe.metric is not None:
        compute_metrics = of_predictions(parts.tokenizer, SCORES[recipe.metric])
    if getattr(args, "predict_with_generate", False) and args.generation_max_length is None:
        args.generation_max_length = recipe.data.max_length  # as long as the targets may be
    trainer = (Seq2SeqTrainer if recipe.task == "seq2seq" else Trainer)(
        model=model,
        args=args,
        data_collator=_collator(recipe, parts.tokenizer, model),
        train_dataset=parts.train,
        eval_dataset=parts.evaluation,
        processing_class=parts.tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=_predicted_class if parts.labels else None,
    )
    trainer.add_callback(ReportCallback(run_folder(args)))
    return trainer


def _collator(recipe: Recipe, tokenizer: Any, model: Any) -> Any:
    if recipe.task == "classification":
        return DataCollatorWithPadding(tokenizer)
    if recipe.task == "masked-lm":
        return DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.data.mlm_probability)
    return DataCollatorForSeq2Seq(tokenizer, model) if recipe.task == "seq2seq" else default_data_collator


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
        pad = parts.tokenizer.pad_token_id
        ids = generate(model, prompt, max_new_tokens=most, pad_token_id=pad, **choice)
    model.train(was_training)
    return " ".join(parts.tokenizer.decode(ids[0], skip_special_tokens=True).split())
