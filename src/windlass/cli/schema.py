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


def _note(doc: str, choices: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {"doc": doc, "choices": choices}


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where the samples come from and how they are cut."""

    train: str = field(default="", metadata=_note("file, folder or hub name"))
    eval: str | None = field(
        default=None, metadata=_note("the same for evaluation; without it a part of train is held out")
    )
    eval_fraction: float = field(
        default=0.05, metadata=_note("share of train held out when eval is not given; 0 = no evaluation")
    )
    format: str = field(default="auto", metadata=_note("auto goes by the file's ending", FORMATS))
    columns: list[str] | None = field(
        default=None, metadata=_note("names of the columns of a csv/tsv file that has no header line")
    )
    text_column: str = field(default="text", metadata=_note("column (jsonl key) with the text"))
    label_column: str = field(
        default="label", metadata=_note("column (jsonl key) with the class; classification only")
    )
    block_size: int = field(default=256, metadata=_note("tokens in a training sample; causal-lm only"))
    max_length: int = field(
        default=128, metadata=_note("longer texts are cut to so many tokens; classification only")
    )
    max_samples: int | None = field(
        default=None, metadata=_note("use only the first so many records of each source")
    )
    subset: str | None = field(default=None, metadata=_note("hub only: configuration of the dataset"))
    split: str = field(default="train", metadata=_note("hub only: split to train on"))
    eval_split: str | None = field(default=None, metadata=_note("hub only: split to evaluate on"))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: a name to load, or a config to start from fresh weights."""

    name: str | None = field(default=None, metadata=_note("local folder or hub name of a pretrained model"))
    config: dict[str, Any] | None = field(
        default=None, metadata=_note("model_type and sizes of a new model, as in its config.json")
    )
    dtype: str = field(default="float32", metadata=_note("dtype of the weights", DTYPES))


@dataclass(frozen=True, slots=True)
class TokenizerTraining:
    """A tokenizer trained on the training text."""

    vocab_size: int = field(
        default=2048,
        metadata=_note("entries, special tokens included; what the text offers when that is less"),
    )
    algorithm: str = field(
        default="auto",
        metadata=_note("auto: bpe (byte level) for causal-lm, wordpiece for classification", ALGORITHMS),
    )
    lowercase: bool = field(default=False, metadata=_note("fold case first; wordpiece only"))


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The tokenizer: a name to load, or how to train one. With neither: that of model.name."""

    name: str | None = field(default=None, metadata=_note("local folder or hub name"))
    train: TokenizerTraining | None = field(
        default=None, metadata=_note("how to train one on the training text")
    )


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What is shown before and after training; causal-lm only."""

    prompt: str | None = field(default=None, metadata=_note("text to continue; null = show nothing"))
    max_new_tokens: int = field(default=40, metadata=_note("length of the continuation, in tokens"))
    temperature: float = field(default=0.8, metadata=_note("0 = always the likeliest token"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that `windlass train` needs to know. `training` holds any field of `TrainingArguments`."""

    task: str = field(default="causal-lm", metadata=_note("what the model learns", TASKS))
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    parallel: dict[str, Any] = field(
        default_factory=dict,
        metadata=_note("how it is spread over processes: {strategy: fsdp}, {precision: bf16}"),
    )
    training: dict[str, Any] = field(default_factory=dict)


# `model: name` in a recipe is short for `model: {name: name}`.
SHORTHANDS = {
    "data": "train",
    "model": "name",
    "tokenizer": "name",
    "sample": "prompt",
    "parallel": "strategy",
}

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
