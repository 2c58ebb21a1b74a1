# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""The keys of a recipe, the formats of its data, and what it is trained with. No heavy package is imported here.

`windlass train --print-config` prints the text of a field; `choices` and `bounds` limit its value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from windlass.config.sections.setting import BELOW_ONE, Range, setting
from windlass.config.values import members

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".parquet": "parquet",
}
PYTHON_DOCS, DIGITS = "python-docs", "digits"
FORMATS = ("auto", *dict.fromkeys(ENDINGS.values()), "folder", "hub", PYTHON_DOCS, "parallel", DIGITS)
METRICS = ("bleu", "rouge")
ALGORITHMS = ("auto", "bpe", "wordpiece")
QUANTIZATIONS = ("nf4", "fp4", "int8")
DTYPES = ("float32", "bfloat16", "float16")


def _count(low: int) -> Range:
    """A number of things that fit into memory: libraries abort the process for larger ones."""
    return Range(lambda number: low <= number < 2**31, f"must be at least {low} and below 2**31")


_NOT_NEGATIVE = Range(lambda number: 0 <= number < math.inf, "must be 0 or more")


@dataclass(frozen=True, slots=True)
class MessagesSpec:
    """Conversations under names of their own."""

    column: str = setting("messages", "column (jsonl key) with the list of messages")
    role: str = setting("role", "key of a message with the role")
    content: str = setting("content", "key of a message with the text")
    roles: dict[str, str] | None = setting(None, "role in the data -> user, assistant, system or tool")


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The source of the samples, and their length."""

    train: str = setting("", "file, folder or hub name")
    mixture: dict[str, float] | list[str] | None = setting(
        None, "several files instead of train: a list (all their rows), or file -> weight (in these shares)"
    )
    eval: str | None = setting(None, "the same for evaluation; without it a part of train is held out")
    eval_fraction: float = setting(
        0.05, "share of train held out when eval is not given; 0 = no evaluation", bounds=BELOW_ONE
    )
    test: str | None = setting(None, "measured once, after training")
    format: str = setting("auto", "auto follows the file's ending", choices=FORMATS)
    columns: list[str] | None = setting(
        None, "names of the columns of a csv/tsv file that has no header line"
    )
    text_column: str = setting("text", "column (jsonl key) with the text")
    label_column: str = setting("label", "column (jsonl key) with the class")
    target_column: str = setting("target", "column (jsonl key) with the text to generate")
    prompt_column: str | None = setting(None, "column (jsonl key) with the prompt")
    completion_column: str | None = setting(None, "column (jsonl key) with the answer to it")
    prompt_format: str | list[str] | None = setting(
        None, "the prompt as text with {column}; of a list, the first whose columns all have a value"
    )
    rename: dict[str, str] | None = setting(None, "column of the file -> name that it is read under")
    messages: MessagesSpec | None = setting(None, "where conversations are, if under other names than usual")
    block_size: int = setting(256, "tokens in a sample", bounds=_count(2))
    max_length: int = setting(128, "longer texts are cut to so many tokens", bounds=_count(4))
    mlm_probability: float = setting(0.15, "share of the tokens that are hidden", bounds=BELOW_ONE)
    image_size: int | None = setting(None, "width and height that images are scaled to", bounds=_count(1))
    max_samples: int | None = setting(
        None,
        "use only the first so many records of each source; of a folder, in turn from each class",
        bounds=_count(1),
    )
    streaming: bool = setting(False, "read train while training, without loading it into memory")
    eval_rows: int | None = setting(
        None, "streaming only: so many rows at the beginning of train are held out", bounds=_count(1)
    )
    subset: str | None = setting(None, "hub only: configuration of the dataset")
    split: str = setting("train", "hub only: split to train on")
    eval_split: str | None = setting(None, "hub only: split to evaluate on, of eval or else of train")
    test_split: str | None = setting(None, "hub only: split for test, of test or else of train")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model: a name to load, or a config to start from fresh weights."""

    name: str | None = setting(None, "local folder or hub name of a pretrained model")
    model_type: str | None = setting(
        None, "that of its config.json; checked when it is loaded, and what `--tiny` builds instead"
    )
    config: dict[str, Any] | None = setting(
        None, "model_type and sizes of a new model, as in its config.json"
    )
    dtype: str = setting("float32", "dtype of the weights", choices=DTYPES)


@dataclass(frozen=True, slots=True)
class TokenizerTraining:
    """A tokenizer trained on the training text."""

    vocab_size: int = setting(
        2048, "entries, special tokens included; what the text offers when that is less", bounds=_count(260)
    )
    algorithm: str = setting(
        "auto", "auto: bpe (byte level) for causal-lm and seq2seq, else wordpiece", choices=ALGORITHMS
    )
    lowercase: bool = setting(False, "fold case first; wordpiece only")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The tokenizer: a name to load, or how to train one. With neither: that of model.name."""

    name: str | None = setting(None, "local folder or hub name")
    train: TokenizerTraining | None = setting(None, "how to train one on the training text")


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A small model that is trained on the same text first, as the model to tune."""

    config: dict[str, Any] = setting({}, "as in its config.json; replaces keys of a small llama")
    block_size: int = setting(256, "tokens in a training sample", bounds=_count(2))
    max_steps: int = setting(300, "updates", bounds=_count(1))
    batch_size: int = setting(8, "samples per process and forward", bounds=_count(1))
    learning_rate: float = setting(3e-3, "learning rate at the end of warm-up", bounds=_NOT_NEGATIVE)


@dataclass(frozen=True, slots=True)
class EarlyStoppingSpec:
    """When a run ends because `training.metric_for_best_model` no longer improves."""

    patience: int = setting(1, "evaluations in a row without improvement", bounds=_count(1))
    threshold: float = setting(0.0, "the least improvement that counts", bounds=_NOT_NEGATIVE)


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The text generated before and after training."""

    prompt: str | None = setting(None, "text to continue; null = generate nothing")
    max_new_tokens: int = setting(40, "length of the continuation, in tokens", bounds=_count(1))
    temperature: float = setting(0.8, "0 = always the likeliest token", bounds=_NOT_NEGATIVE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that `windlass train` needs. `training` has any field of the task's arguments.

    Keys that not every task reads are listed by the tasks that do (`Task.own_keys`).
    """

    task: str = setting("causal-lm", "what the model learns")
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    metric: str | None = setting(None, "of generated text, and for load_best_model_at_end", choices=METRICS)
    base: BaseSpec | None = setting(
        None, "without model.name a small one is trained first; with it, no effect"
    )
    adapter: dict[str, Any] | None = setting(
        None, "train a LoRA adapter; options of peft.LoraConfig, such as {r: 8}"
    )
    quantization: str | None = setting(
        None, "load the model in few bits (bitsandbytes)", choices=QUANTIZATIONS
    )
    early_stopping: EarlyStoppingSpec | None = setting(
        None, "end when training.metric_for_best_model no longer improves, such as {patience: 3}"
    )
    sample: SampleSpec = field(default_factory=SampleSpec)
    parallel: dict[str, Any] = setting(
        {}, "how it is spread over processes: {strategy: fsdp}, {precision: bf16}"
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


def _nested(kind: type) -> Iterator[tuple[tuple[type, str], type]]:
    for name, hint in get_type_hints(kind).items():
        for inner in members(hint):
            if isinstance(inner, type) and is_dataclass(inner):
                yield (kind, name), inner
                yield from _nested(inner)


NESTED = dict(_nested(Recipe))
"""Sections by the field that holds them. They may be absent (null) and are still mappings when given."""


def field_names(kind: type) -> list[str]:
    return [item.name for item in fields(kind)]


@dataclass(frozen=True, slots=True)
class RecipeParts:
    """Tokenizer and data of a recipe.

    Attributes:
        tokenizer: None for images.
        train, evaluation, test: sequences of samples; the last two are None without any.
        labels: names of the classes, in the order of their ids; empty without classes.
        takes_turns: samples are conversations, in the tokenizer's chat template.
        resumed: they continue the run of a checkpoint, which has their tokenizer.
    """

    recipe: Recipe
    tokenizer: Any
    train: Any
    evaluation: Any
    labels: Sequence[str] = ()
    test: Any = None
    takes_turns: bool = False
    resumed: bool = False


UNKNOWN_ENDING = f"unknown file ending (known: {', '.join(sorted(ENDINGS))}); set data.format"
# Formats whose source is not a path.
PATHLESS = ("hub", PYTHON_DOCS, DIGITS)
# Formats that bring their own data.
BUILT_IN = (PYTHON_DOCS, DIGITS)
# Formats that are read as a stream.
STREAMED = ("hub", "jsonl", "parquet")
# Formats without labels or targets.
PLAIN_TEXT = ("txt", PYTHON_DOCS)


def format_of(source: str, data: DataSpec) -> str | None:
    """Return the format of `source`: that of the recipe, else by the path; None if its ending is not known."""
    if data.format != "auto":
        return data.format
    if os.path.isdir(source):
        return "folder"
    return ENDINGS.get(Path(source.lower().removesuffix(".gz")).suffix)


def is_data(word: str) -> bool:
    """Return True if a word in the place of a recipe names data. A `.json` file may be both, and is a recipe here."""
    kind = format_of(word, DataSpec())
    return kind is not None and kind != "json"
