"""Rules of a recipe that concern several keys, and the files that it names. No file is opened here."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from windlass.config.values import members, type_fault
from windlass.core.errors import ConfigError, Problem, did_you_mean, nearest
from windlass.core.locations import is_folder_name, is_url
from windlass.core.optional import is_available
from windlass.recipes.modelling import base_config, config_of, writing_fault
from windlass.recipes.recipe_draft import RecipeDraft
from windlass.recipes.schema import (
    BUILT_IN,
    PATHLESS,
    SHORTHANDS,
    UNKNOWN_ENDING,
    DataSpec,
    Recipe,
    format_of,
)
from windlass.recipes.task import Conflict
from windlass.recipes.tasks import TASKS

_OF_HUB = ("subset", "split", "eval_split", "test_split")
ONLY_FOR_FORMAT = {"columns": ("csv", "tsv"), **dict.fromkeys(_OF_HUB, ("hub",))}


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
    for path, count in Counter([*(data.mixture or ())]).items():
        if count > 1:
            fix = f"names {path} {count} times; name it once, or give files weights: {{{path}: {count}}}"
            yield "data.mixture", data.mixture, fix
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
    for key in ("eval", "test"):
        if data.format == "hub" and (source := getattr(data, key)) and not getattr(data, f"{key}_split"):
            yield f"data.{key}", source, f"is a dataset of the hub; set data.{key}_split to the split to read"


def _path_problem(source: str, recipe: Recipe) -> str | None:
    if is_url(source):  # of a path that is made of it, no message could leave out the credentials
        return "is a URL: download it, and name the file; a dataset of the hub needs data.format=hub"
    path = Path(source)
    try:
        path.stat()
    except UnicodeEncodeError:
        return "cannot be named in the encoding of this locale: set PYTHONUTF8=1"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"no such file or folder{_neighbour(path)}; a dataset of the hub needs data.format=hub"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    kind = format_of(source, recipe.data)
    if kind is None:
        return UNKNOWN_ENDING
    if problem := TASKS[recipe.task].file_problem(kind):
        return problem
    # Otherwise reading fails with an error of the system, which does not name the key.
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
    sources = (data.train, *(data.mixture or ()), data.eval, data.test)
    formats = {format_of(source, data) for source in sources if source} - {None}
    for name, allowed in ONLY_FOR_FORMAT.items():
        if getattr(data, name) != getattr(default, name) and formats - set(allowed):
            fix = f"has a meaning for {' and '.join(allowed)} data only; leave it out"
            yield f"data.{name}", getattr(data, name), fix


_MODEL_FILES = ("config.json", "adapter_config.json")


def _names(recipe: Recipe, opens_files: bool) -> Iterator[Conflict]:
    model, tokenizer = recipe.model, recipe.tokenizer
    if tokenizer.name is not None and tokenizer.train is not None:
        yield "tokenizer", "both", "give one: tokenizer.name (an existing one) or tokenizer.train (a new one)"
    if tokenizer.train is not None and tokenizer.train.lowercase and tokenizer.train.algorithm == "bpe":
        yield "tokenizer.train.lowercase", True, "is for wordpiece; byte-level bpe keeps every byte"
    named = (("model.name", model.name), ("tokenizer.name", tokenizer.name)) if opens_files else ()
    for dotted, name in named:
        if name is not None and is_folder_name(name) and not os.path.exists(name):
            yield dotted, name, "no such folder"
        checkpoints = _checkpoints_of_run(name)
        if checkpoints:
            yield (
                dotted,
                name,
                f"is the folder of a run, not of a model; name one of its checkpoints: {checkpoints[-1]}",
            )


def _checkpoints_of_run(name: str | None) -> list[Path]:
    """The checkpoints with a model in a folder that holds none itself, in order."""
    if name is None or not os.path.isdir(name) or _holds_model(name):
        return []
    found = [path for path in Path(name).glob("checkpoint-*") if _holds_model(path)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _holds_model(folder: str | Path) -> bool:
    return any(os.path.isfile(os.path.join(folder, file)) for file in _MODEL_FILES)


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


# peft writes these into an adapter that it saves; given, they would have no effect or break it.
_SET_BY_PEFT = ("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode")


def handed_on_faults(recipe: Recipe) -> Iterator[Conflict]:
    """Yield what the libraries that read `adapter`, `model.config` and `base.config` would refuse. A library that is
    not installed is not asked: its absence is an error of its own.
    """
    if recipe.adapter is not None and is_available("peft"):
        yield from _adapter_faults(recipe.adapter)
    if is_available("transformers"):
        if recipe.model.config and recipe.model.name is None:
            yield from _config_faults("model.config", recipe.model.config, TASKS[recipe.task].writes)
        if recipe.base is not None and recipe.model.name is None:
            yield from _config_faults("base.config", base_config(recipe.base.config), writes=True)


def _adapter_faults(values: Mapping[str, Any]) -> Iterator[Conflict]:
    from windlass.checkpoint.adapters import peft_library  # which imports torch

    lora = peft_library("train an adapter").LoraConfig
    faults = [*declared_faults("adapter", values, lora), *_adapter_bounds(values)]
    faults += [
        (f"adapter.{name}", values[name], "is set by peft; leave it out")
        for name in _SET_BY_PEFT
        if name in values
    ]
    yield from faults
    if not faults:
        try:
            lora(**{"task_type": "CAUSAL_LM", **values})
        except Exception as error:  # what meets in its __post_init__, of any type
            yield "adapter", dict(values), " ".join(str(error).split())


def _adapter_bounds(values: Mapping[str, Any]) -> Iterator[Conflict]:
    """Ranges that peft checks only when it builds the layers."""
    ranks = {"r": values.get("r", 1)}
    if isinstance(values.get("rank_pattern"), Mapping):
        ranks |= {f"rank_pattern.{name}": rank for name, rank in values["rank_pattern"].items()}
    for name, rank in ranks.items():
        if name == "r" and not isinstance(rank, int):
            continue  # found by its declaration
        if not isinstance(rank, int) or rank < 1:
            yield f"adapter.{name}", rank, "must be a whole number of 1 or more"
    dropout = values.get("lora_dropout", 0)
    if isinstance(dropout, int | float) and not 0 <= dropout <= 1:
        yield "adapter.lora_dropout", dropout, "must be between 0 and 1"


def declared_faults(where: str, values: Mapping[str, Any], kind: type) -> Iterator[Conflict]:
    """Yield the keys that dataclass `kind` does not have, and the values of another type than it declares; a mapping
    for a field that is a dataclass itself is compared with that one.
    """
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind) if item.init]
    for name, value in values.items():
        dotted = f"{where}.{name}"
        if name not in known:
            yield dotted, value, f"{kind.__name__} has no such option{_meant(str(name), known)}"
            continue
        kinds = [item for item in members(hints[name]) if isinstance(item, type)]
        inner = [item for item in kinds if dataclasses.is_dataclass(item)]
        if inner and isinstance(value, Mapping):
            yield from declared_faults(dotted, value, inner[0])
        elif not _is_numbered_word(value, hints[name]) and (fault := type_fault(value, members(hints[name]))):
            yield dotted, value, fault


def _meant(name: str, known: list[str]) -> str:
    """Name the option that is meant. Flags and other programs write `lora_r` or `lora_rank` for `r`."""
    short = {"lora_rank": "r"}.get(name, name.removeprefix("lora_"))
    return f"; did you mean {short!r}?" if short in known else did_you_mean(name, known)


def _is_numbered_word(value: Any, hint: Any) -> bool:
    """Return True for `pissa_niter_4`, which peft declares as the word `pissa_niter_[number of iters]`."""
    words = [
        word
        for kind in members(hint)
        if typing.get_origin(kind) is typing.Literal
        for word in typing.get_args(kind)
    ]
    stems = [word.partition("[")[0] for word in words if isinstance(word, str) and "[" in word]
    return isinstance(value, str) and any(value.removeprefix(stem).isdecimal() for stem in stems)


def _config_faults(where: str, values: Mapping[str, Any], writes: bool) -> Iterator[Conflict]:
    if not isinstance(values.get("model_type"), str):
        return  # reported as such by the task
    try:
        config = config_of(dict(values), {}, where)
        if writes and (fault := writing_fault(config)):
            yield f"{where}.model_type", values["model_type"], fault
    except ConfigError as error:
        # How sizes fit together is checked when the model is built: some follow from the data.
        if type(error.__cause__).__name__ == "StrictDataclassClassValidationError":
            return
        for problem in error.problems:
            yield problem.field, problem.value, problem.fix
