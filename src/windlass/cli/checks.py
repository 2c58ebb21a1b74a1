"""Rules of a recipe that concern several keys, and the files that it names. No file is opened here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from windlass.cli.formats import BUILT_IN, ENDINGS, PATHLESS, format_of
from windlass.cli.handed_on import handed_on_faults
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import SHORTHANDS, DataSpec, Recipe
from windlass.cli.task import Conflict
from windlass.cli.tasks import TASKS
from windlass.config.nearest import nearest
from windlass.core.errors import Problem
from windlass.core.locations import is_folder_name

ONLY_FOR_FORMAT = {"columns": ("csv", "tsv"), "subset": ("hub",), "split": ("hub",), "eval_split": ("hub",)}


def find_conflicts(recipe: Recipe, draft: RecipeDraft, opens_files: bool = True) -> list[Problem]:
    """Return all problems between keys, and with `opens_files` all missing files."""
    found = chain(
        _sources(recipe, opens_files),
        _out_of_place(recipe),
        TASKS[recipe.task].conflicts(recipe),
        _names(recipe, opens_files),
        _evaluation(recipe),
    )
    return _labelled(found, draft)


def ask_libraries(recipe: Recipe, draft: RecipeDraft) -> list[Problem]:
    """Return what the libraries would refuse that read parts of the recipe. They are imported, which takes seconds."""
    return _labelled(handed_on_faults(recipe), draft)


def _labelled(found: Iterable[Conflict], draft: RecipeDraft) -> list[Problem]:
    return [Problem(draft.label(*dotted.split(".")), value, fix) for dotted, value, fix in found]


def _sources(recipe: Recipe, opens_files: bool) -> Iterator[Conflict]:
    data = recipe.data
    readers = [name for name, task in TASKS.items() if data.format in task.own_formats]
    if readers and recipe.task not in readers:
        yield "data.format", data.format, f"is for task {' and '.join(readers)}; {recipe.task} needs another"
    if data.format in BUILT_IN:
        if data.eval is not None:
            yield "data.eval", data.eval, f"{data.format} holds out its own part; leave this out"
        for key, source in (("data.train", data.train), ("data.mixture", data.mixture)):
            if source:
                yield key, source, f"{data.format} brings its own data; to read this, set data.format=auto"
        return
    if data.mixture and data.train:
        yield "data.mixture", data.mixture, f"give either data.mixture or data.train={data.train}"
    elif opens_files and not data.train and not data.mixture:
        fix = "names the training data: a file, a folder or (format: hub) a hub name"
        yield "data.train", data.train, fix
    mixed = [(f"data.mixture.{path}", path) for path in data.mixture or ()]
    for key, source in (
        ("data.train", data.train),
        *mixed,
        ("data.eval", data.eval),
        ("data.test", data.test),
    ):
        if not (opens_files and source) or data.format in PATHLESS:
            continue
        if problem := _path_problem(source, recipe):
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
    if problem := TASKS[recipe.task].file_problem(kind):
        return problem
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
    task = TASKS[recipe.task]
    for dotted in dict.fromkeys(key for other in TASKS.values() for key in other.own_keys):
        read = attrgetter(dotted)
        if dotted not in task.own_keys and read(recipe) != read(Recipe()):
            shown = f"{dotted}.{SHORTHANDS[dotted]}" if dotted in SHORTHANDS else dotted
            yield dotted, attrgetter(shown)(recipe), f"has no meaning for task {recipe.task}; leave it out"
    sources = (data.train, *(data.mixture or ()), data.eval)
    formats = {format_of(source, data) for source in sources if source} - {None}
    for name, allowed in ONLY_FOR_FORMAT.items():
        if getattr(data, name) != getattr(default, name) and formats - set(allowed):
            fix = f"has a meaning for {' and '.join(allowed)} data only; leave it out"
            yield f"data.{name}", getattr(data, name), fix


def _names(recipe: Recipe, opens_files: bool) -> Iterator[Conflict]:
    model, tokenizer = recipe.model, recipe.tokenizer
    if tokenizer.name is not None and tokenizer.train is not None:
        yield "tokenizer", "both", "give one: tokenizer.name (an existing one) or tokenizer.train (a new one)"
    if tokenizer.train is not None and tokenizer.train.lowercase and tokenizer.train.algorithm == "bpe":
        yield "tokenizer.train.lowercase", True, "is for wordpiece; byte-level bpe keeps every byte"
    named = (("model.name", model.name), ("tokenizer.name", tokenizer.name)) if opens_files else ()
    for dotted, name in named:
        if name is not None and is_folder_name(name) and not Path(name).expanduser().exists():
            yield dotted, name, "no such folder"


def evaluates(training: Mapping[str, Any]) -> bool:
    """Return True if a section `training` asks for evaluations during the run."""
    return training.get("eval_strategy", "no") not in ("no", False, None)


def _evaluation(recipe: Recipe) -> Iterator[Conflict]:
    data, strategy = recipe.data, recipe.training.get("eval_strategy", "no")
    held = data.eval_rows if data.streaming else data.eval_fraction
    if evaluates(recipe.training) and data.eval is data.eval_split is None and not held:
        key = "eval_rows" if data.streaming else "eval_fraction above 0"
        fix = f"needs data to evaluate on: data.eval, or data.{key}"
        yield "training.eval_strategy", strategy, fix
    if recipe.early_stopping is not None and not evaluates(recipe.training):
        fix = "follows evaluations; set training.eval_strategy to steps or epoch"
        yield "early_stopping", {"patience": recipe.early_stopping.patience}, fix
