"""The rules of a recipe that concern more than one key, and the files it names. Nothing is opened here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import DataSpec, ModelSpec, Recipe, SampleSpec, TokenizerSpec
from windlass.config.nearest import nearest
from windlass.core.errors import Problem

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".parquet": "parquet",
}
PATHLESS = ("hub", "python-docs")
# Fields that mean something under one condition only: setting them elsewhere would be ignored, so it is refused.
ONLY_FOR_TASK = {"label_column": "classification", "max_length": "classification", "block_size": "causal-lm"}
ONLY_FOR_FORMAT = {
    "columns": ("csv", "tsv"),
    "subset": ("hub",),
    "split": ("hub",),
    "eval_split": ("hub",),
}
Say = Callable[[str, object, str], Problem]


def format_of(source: str, data: DataSpec) -> str | None:
    """The format of `source`: as the recipe says, else by the path's kind and ending; None where that tells nothing."""
    if data.format != "auto":
        return data.format
    if os.path.isdir(source):
        return "folder"
    return ENDINGS.get(Path(source).suffix.lower())


def find_conflicts(recipe: Recipe, draft: RecipeDraft) -> list[Problem]:
    """All problems between keys, and all files that are not there."""

    def say(dotted: str, value: object, fix: str) -> Problem:
        return Problem(draft.label(*dotted.split(".")), value, fix)

    return [
        *_sources(recipe, say),
        *_out_of_place(recipe, say),
        *_model_and_tokenizer(recipe.model, recipe.tokenizer, say),
        *_sample(recipe, say),
    ]


def _sources(recipe: Recipe, say: Say) -> Iterator[Problem]:
    data = recipe.data
    if data.format == "python-docs":
        if recipe.task != "causal-lm":
            yield say(
                "data.format",
                data.format,
                "is plain text without labels; classification needs a labelled file",
            )
        if data.eval is not None:
            yield say("data.eval", data.eval, "python-docs holds out its own part; leave this out")
        if data.train:
            yield say(
                "data.train",
                data.train,
                "python-docs brings its own text; to read this, set data.format=auto",
            )
        return
    if not data.train:
        yield say(
            "data.train", data.train, "names the training data: a file, a folder or (format: hub) a hub name"
        )
    for key, source in (("data.train", data.train), ("data.eval", data.eval)):
        if source and data.format not in PATHLESS:
            yield from _path_problems(key, source, recipe, say)
    if data.eval is not None and data.eval_split is not None:
        yield say("data.eval_split", data.eval_split, "give either data.eval or data.eval_split")


def _path_problems(key: str, source: str, recipe: Recipe, say: Say) -> Iterator[Problem]:
    path = Path(source)
    if not path.exists():
        yield say(
            key,
            source,
            "no such file or folder" + _neighbour(path) + "; a dataset of the hub needs data.format=hub",
        )
        return
    kind = format_of(source, recipe.data)
    if kind is None:
        known = ", ".join(sorted(set(ENDINGS)))
        yield say(key, source, f"the ending tells no format (known: {known}); set data.format")
    elif kind == "txt" and recipe.task == "classification":
        yield say(
            key,
            source,
            "a txt file has no labels; classification reads jsonl, csv, tsv, parquet, folder or hub",
        )
    elif (kind == "folder") != path.is_dir():
        yield say(
            key,
            source,
            f"is {'a folder' if path.is_dir() else 'a file'}, which data.format={kind} does not read",
        )
    elif not os.access(path, os.R_OK):
        yield say(key, source, "cannot be read: permission denied")


def _neighbour(path: Path) -> str:
    try:
        close = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return f" (nor is there a folder {path.parent})"
    return f" (there is {path.parent / close})" if close else ""


def _out_of_place(recipe: Recipe, say: Say) -> Iterator[Problem]:
    data, default = recipe.data, DataSpec()
    formats = {format_of(source, data) for source in (data.train, data.eval) if source}
    for name, task in ONLY_FOR_TASK.items():
        if getattr(data, name) != getattr(default, name) and recipe.task != task:
            yield say(
                f"data.{name}", getattr(data, name), f"has no meaning for task {recipe.task}; leave it out"
            )
    for name, allowed in ONLY_FOR_FORMAT.items():
        if getattr(data, name) != getattr(default, name) and formats - {None} - set(allowed):
            only = " and ".join(allowed)
            yield say(
                f"data.{name}", getattr(data, name), f"has a meaning for {only} data only; leave it out"
            )


def _model_and_tokenizer(model: ModelSpec, tokenizer: TokenizerSpec, say: Say) -> Iterator[Problem]:
    if (model.name is None) == (model.config is None):
        given = "both" if model.name is not None else "neither"
        yield say("model", given, "give one: model.name (a pretrained model) or model.config (a new one)")
    if model.config is not None and not isinstance(model.config.get("model_type"), str):
        yield say(
            "model.config.model_type",
            model.config.get("model_type"),
            "says which model: llama, bert, gpt2, ...",
        )
    if tokenizer.name is not None and tokenizer.train is not None:
        yield say(
            "tokenizer", "both", "give one: tokenizer.name (an existing one) or tokenizer.train (a new one)"
        )
    if tokenizer.name is None and tokenizer.train is None and model.name is None:
        yield say("tokenizer", "neither", "a new model needs tokenizer.train (a new one) or tokenizer.name")
    if tokenizer.train is not None and tokenizer.train.lowercase and tokenizer.train.algorithm == "bpe":
        yield say("tokenizer.train.lowercase", True, "is for wordpiece; byte-level bpe keeps every byte")
    for dotted, name in (("model.name", model.name), ("tokenizer.name", tokenizer.name)):
        if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
            yield say(dotted, name, "no such folder")


def _sample(recipe: Recipe, say: Say) -> Iterator[Problem]:
    if recipe.task != "causal-lm" and recipe.sample != SampleSpec():
        yield say("sample", recipe.sample.prompt, f"has no meaning for task {recipe.task}; leave it out")
