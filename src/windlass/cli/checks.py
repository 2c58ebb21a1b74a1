"""Rules of a recipe that concern several keys, and the files that it names. No file is opened here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import DataSpec, ModelSpec, Recipe, SampleSpec, TokenizerSpec
from windlass.config.nearest import nearest
from windlass.core.errors import Problem

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
IMAGES = "image-classification"
PATHLESS = ("hub", "python-docs", "digits")
# Keys that apply to one task or to some formats only. Elsewhere they would be ignored, so they are refused.
ONLY_FOR_TASK = {
    "label_column": ("classification", "image-classification"),
    "target_column": ("seq2seq",),
    "test": ("seq2seq",),
    "max_length": ("classification", "seq2seq"),
    "block_size": ("causal-lm", "masked-lm"),
    "mlm_probability": ("masked-lm",),
    "image_size": ("image-classification",),
    "prompt_column": ("sft",),
    "completion_column": ("sft",),
    "mixture": ("sft",),
}
# Formats without labels or targets, and the tasks that read them.
PLAIN_TEXT = ("causal-lm", "masked-lm", "sft")
TASKS_OF_FORMAT = {
    "txt": PLAIN_TEXT,
    "python-docs": PLAIN_TEXT,
    "parallel": ("seq2seq",),
    "digits": (IMAGES,),
}
ONLY_FOR_FORMAT = {"columns": ("csv", "tsv"), "subset": ("hub",), "split": ("hub",), "eval_split": ("hub",)}
Conflict = tuple[str, object, str]  # dotted key, value, fix


def format_of(source: str, data: DataSpec) -> str | None:
    """Return the format of `source`: that of the recipe, else by the path; None if its ending is not known."""
    if data.format != "auto":
        return data.format
    if os.path.isdir(source):
        return "folder"
    return ENDINGS.get(Path(source.lower().removesuffix(".gz")).suffix)


def find_conflicts(recipe: Recipe, draft: RecipeDraft) -> list[Problem]:
    """Return all problems between keys, and all missing files."""
    found = chain(
        _sources(recipe),
        _out_of_place(recipe),
        _tuning(recipe),
        _model_and_tokenizer(recipe.task, recipe.model, recipe.tokenizer),
        _tokenizer_of_images(recipe),
        _sample(recipe),
        _generation(recipe),
        _evaluation(recipe),
    )
    return [Problem(draft.label(*dotted.split(".")), value, fix) for dotted, value, fix in found]


def _sources(recipe: Recipe) -> Iterator[Conflict]:
    data = recipe.data
    readers = TASKS_OF_FORMAT.get(data.format, (recipe.task,))
    if recipe.task not in readers:
        yield "data.format", data.format, f"is for task {' and '.join(readers)}; {recipe.task} needs another"
    if data.format in ("python-docs", "digits"):
        if data.eval is not None:
            yield "data.eval", data.eval, f"{data.format} holds out its own part; leave this out"
        for key, source in (("data.train", data.train), ("data.mixture", data.mixture)):
            if source:
                yield key, source, f"{data.format} brings its own data; to read this, set data.format=auto"
        return
    if data.mixture and data.train:
        yield "data.mixture", data.mixture, f"give either data.mixture or data.train={data.train}"
    elif not data.train and not data.mixture:
        fix = "names the training data: a file, a folder or (format: hub) a hub name"
        yield "data.train", data.train, fix
    mixed = [(f"data.mixture.{path}", path) for path in data.mixture or ()]
    for key, source in (
        ("data.train", data.train),
        *mixed,
        ("data.eval", data.eval),
        ("data.test", data.test),
    ):
        if source and data.format not in PATHLESS and (problem := _path_problem(source, recipe)):
            yield key, source, problem
    if data.eval is not None and data.eval_split is not None:
        yield "data.eval_split", data.eval_split, "give either data.eval or data.eval_split"


def _path_problem(source: str, recipe: Recipe) -> str | None:
    path = Path(source)
    if not path.exists():
        return f"no such file or folder{_neighbour(path)}; a dataset of the hub needs data.format=hub"
    kind = format_of(source, recipe.data)
    if kind is None:
        return f"unknown file ending (known: {', '.join(sorted(ENDINGS))}); set data.format"
    if kind == "txt" and recipe.task not in PLAIN_TEXT:
        also = "parallel or hub" if recipe.task == "seq2seq" else "folder or hub"
        return f"a txt file has no labels; {recipe.task} reads jsonl, csv, tsv, parquet, {also}"
    if kind != "folder" and recipe.task == IMAGES:
        return (
            "image-classification reads a folder with one folder of images for each class, or format digits"
        )
    if (kind == "folder") != path.is_dir():
        return f"is {'a folder' if path.is_dir() else 'a file'}, which data.format={kind} does not read"
    return None if os.access(path, os.R_OK) else "cannot be read: permission denied"


def _neighbour(path: Path) -> str:
    try:
        close = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return f" (nor is there a folder {path.parent})"
    return f" (there is {path.parent / close})" if close else ""


def _out_of_place(recipe: Recipe) -> Iterator[Conflict]:
    data, default = recipe.data, DataSpec()
    sources = (data.train, *(data.mixture or ()), data.eval)
    formats = {format_of(source, data) for source in sources if source} - {None}
    for name, tasks in ONLY_FOR_TASK.items():
        if getattr(data, name) != getattr(default, name) and recipe.task not in tasks:
            yield f"data.{name}", getattr(data, name), f"has no meaning for task {recipe.task}; leave it out"
    for name, allowed in ONLY_FOR_FORMAT.items():
        if getattr(data, name) != getattr(default, name) and formats - set(allowed):
            fix = f"has a meaning for {' and '.join(allowed)} data only; leave it out"
            yield f"data.{name}", getattr(data, name), fix


def _tuning(recipe: Recipe) -> Iterator[Conflict]:
    data = recipe.data
    if recipe.task != "sft":
        for name in ("base", "adapter", "quantization"):
            if getattr(recipe, name) is not None:
                yield name, getattr(recipe, name), f"has no meaning for task {recipe.task}; leave it out"
        return
    if (data.prompt_column is None) != (data.completion_column is None):
        missing = "prompt_column" if data.prompt_column is None else "completion_column"
        yield f"data.{missing}", None, "prompts and completions need a column each; name both or neither"
    if recipe.model.config is not None:
        fix = "names new weights, which cannot be tuned; give model.name, or base.config for a base to train first"
        yield "model.config", recipe.model.config, fix
    if recipe.quantization is not None and recipe.adapter is None:
        fix = "weights of few bits are not trained themselves; add an adapter, such as adapter={r: 8}"
        yield "quantization", recipe.quantization, fix


def _model_and_tokenizer(task: str, model: ModelSpec, tokenizer: TokenizerSpec) -> Iterator[Conflict]:
    builds_base = task == "sft" and model.name is None
    if (model.name is None) == (model.config is None) and not builds_base:
        given = "both" if model.name is not None else "neither"
        yield "model", given, "give one: model.name (a pretrained model) or model.config (a new one)"
    if (
        model.config is not None
        and not builds_base
        and not isinstance(kind := model.config.get("model_type"), str)
    ):
        yield "model.config.model_type", kind, "set the kind of model: llama, bert, gpt2, ..."
    if tokenizer.name is not None and tokenizer.train is not None:
        yield "tokenizer", "both", "give one: tokenizer.name (an existing one) or tokenizer.train (a new one)"
    needs_tokenizer = not builds_base and task != IMAGES
    if tokenizer.name is None and tokenizer.train is None and model.name is None and needs_tokenizer:
        yield "tokenizer", "neither", "a new model needs tokenizer.train (a new one) or tokenizer.name"
    if tokenizer.train is not None and tokenizer.train.lowercase and tokenizer.train.algorithm == "bpe":
        yield "tokenizer.train.lowercase", True, "is for wordpiece; byte-level bpe keeps every byte"
    for dotted, name in (("model.name", model.name), ("tokenizer.name", tokenizer.name)):
        if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
            yield dotted, name, "no such folder"


def _tokenizer_of_images(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.task == IMAGES and recipe.tokenizer != TokenizerSpec():
        yield "tokenizer", "given", f"has no meaning for task {IMAGES}; leave it out"


def _generation(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.task != "seq2seq":
        if recipe.metric is not None:
            yield "metric", recipe.metric, f"has no meaning for task {recipe.task}; leave it out"
    elif recipe.metric is not None and not recipe.training.get("predict_with_generate"):
        fix = "is computed from generated text; leave training.predict_with_generate out"
        yield "metric", recipe.metric, fix


def _sample(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.task == "classification" and recipe.sample != SampleSpec():
        yield "sample", recipe.sample.prompt, f"has no meaning for task {recipe.task}; leave it out"


def _evaluation(recipe: Recipe) -> Iterator[Conflict]:
    data, strategy = recipe.data, recipe.training.get("eval_strategy", "no")
    if (
        strategy not in ("no", False, None)
        and data.eval is data.eval_split is None
        and data.eval_fraction == 0
    ):
        fix = "needs data to evaluate on: data.eval, or data.eval_fraction above 0"
        yield "training.eval_strategy", strategy, fix
