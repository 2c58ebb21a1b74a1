"""What a recipe may say. Pure data: no file is opened and no heavy package imported here.

Each field's `doc` is printed by `windlass train --print-config`; `choices` limits what it may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

TASKS = ("causal-lm", "classification")
FORMATS = ("auto", "jsonl", "csv", "tsv", "txt", "parquet", "folder", "hub", "python-docs")
ALGORITHMS = ("auto", "bpe", "wordpiece")
DTYPES = ("float32", "bfloat16", "float16")


def _field(default: Any, doc: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


def _section(kind: type) -> Any:
    return field(default_factory=kind)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where the samples come from and how they are cut."""

    train: str = _field("", "file, folder or hub name")
    eval: str | None = _field(None, "the same for evaluation; without it a part of train is held out")
    eval_fraction: float = _field(0.05, "share of train held out when eval is not given; 0 = no evaluation")
    format: str = _field("auto", "auto goes by the file's ending", FORMATS)
    columns: list[str] | None = _field(None, "names of the columns of a csv/tsv file that has no header line")
    text_column: str = _field("text", "column (jsonl key) with the text")
    label_column: str = _field("label", "column (jsonl key) with the class; classification only")
    block_size: int = _field(256, "tokens in a training sample; causal-lm only")
    max_length: int = _field(128, "longer texts are cut to so many tokens; classification only")
    max_samples: int | None = _field(None, "use only the first so many records of each source")
    subset: str | None = _field(None, "hub only: configuration of the dataset")
    split: str = _field("train", "hub only: split to train on")
    eval_split: str | None = _field(None, "hub only: split to evaluate on")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: a name to load, or a config to start from fresh weights."""

    name: str | None = _field(None, "local folder or hub name of a pretrained model")
    config: dict[str, Any] | None = _field(None, "model_type and sizes of a new model, as in its config.json")
    dtype: str = _field("float32", "dtype of the weights", DTYPES)


@dataclass(frozen=True, slots=True)
class TokenizerTraining:
    """A tokenizer trained on the training text."""

    vocab_size: int = _field(2048, "entries, special tokens included; what the text offers when that is less")
    algorithm: str = _field(
        "auto", "auto: bpe (byte level) for causal-lm, wordpiece for classification", ALGORITHMS
    )
    lowercase: bool = _field(False, "fold case first; wordpiece only")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The tokenizer: a name to load, or how to train one. With neither: that of model.name."""

    name: str | None = _field(None, "local folder or hub name")
    train: TokenizerTraining | None = _field(None, "how to train one on the training text")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What is shown before and after training; causal-lm only."""

    prompt: str | None = _field(None, "text to continue; null = show nothing")
    max_new_tokens: int = _field(40, "length of the continuation, in tokens")
    temperature: float = _field(0.8, "0 = always the likeliest token")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that `windlass train` needs to know. `training` holds any field of `TrainingArguments`."""

    task: str = _field("causal-lm", "what the model learns", TASKS)
    data: DataSpec = _section(DataSpec)
    model: ModelSpec = _section(ModelSpec)
    tokenizer: TokenizerSpec = _section(TokenizerSpec)
    sample: SampleSpec = _section(SampleSpec)
    training: dict[str, Any] = field(default_factory=dict)


# `model: name` in a recipe is short for `model: {name: name}`.
SHORTHANDS = {"data": "train", "model": "name", "tokenizer": "name", "sample": "prompt"}

# Sections that may be absent (null) and are still mappings when given.
NESTED: dict[tuple[type, str], type] = {
    (Recipe, "data"): DataSpec,
    (Recipe, "model"): ModelSpec,
    (Recipe, "tokenizer"): TokenizerSpec,
    (Recipe, "sample"): SampleSpec,
    (TokenizerSpec, "train"): TokenizerTraining,
}


def field_names(kind: type) -> list[str]:
    """Names of a section's fields, in order."""
    return [item.name for item in fields(kind)]
