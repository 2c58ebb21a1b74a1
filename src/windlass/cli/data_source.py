"""Open what `windlass data` works on: the rows, the tokenizer and the options of a recipe or of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from windlass.cli.built_in_recipes import is_recipe
from windlass.cli.readers import read_records
from windlass.cli.recipe import load_recipe
from windlass.cli.schema import DataSpec, Recipe
from windlass.cli.tasks import TASKS
from windlass.cli.text_source import DataSource, SourceSplit
from windlass.cli.tuning_data import tuning_rows
from windlass.config.documents import parse_override
from windlass.config.values import coerce
from windlass.core.errors import ConfigError, ModelError, Problem, nearest, refuse
from windlass.core.locations import why_not_loaded
from windlass.core.optional import require
from windlass.text.text_options import TextOptions

# Options that a command line cannot hold.
_CODE_ONLY = ("formatting_func",)
_NAMES = tuple(item.name for item in fields(TextOptions) if item.name not in _CODE_ONLY)


def open_source(path: str, overrides: Sequence[str], *, tiny: bool = False) -> DataSource | Recipe:
    """Read the data of a recipe or of a file. A recipe whose samples are made when training starts is returned itself.

    Args:
        overrides: of a recipe: keys of the recipe. Of a file: `tokenizer=NAME`, `data.KEY=...`, and options of the
            preparation, such as `max_length=512`.
        tiny: open the tiny form of a recipe.

    Raises:
        ConfigError: `tiny` with a file of data, or an override is not known. DataError: the file cannot be read.
    """
    if is_recipe(path):
        recipe = load_recipe(path, overrides, tiny=tiny)
        return TASKS[recipe.task].text_source(recipe) or recipe
    if tiny:
        raise ConfigError(Problem("--tiny", path, "is the tiny form of a recipe, and this is a file of data"))
    return _of_file(path, overrides)


def _of_file(path: str, overrides: Sequence[str]) -> DataSource:
    given: dict[str, dict[str, Any]] = {"data": {}, "": {}}
    for override in overrides:
        keys, value = parse_override(override)
        section = given["data"] if len(keys) == 2 and keys[0] == "data" else given[""]
        section[keys[-1] if section is given["data"] else ".".join(keys)] = value
    name = given[""].pop("tokenizer", None)
    data = _checked(DataSpec, given["data"], [item.name for item in fields(DataSpec)], "data.")
    options = _checked(TextOptions, given[""], [*_NAMES, "tokenizer"], "")
    if not Path(path).exists():
        raise ConfigError(Problem("file", path, "no such file; name a recipe (*.yaml) or a file with data"))
    spec = DataSpec(**{"train": path, **data})
    rows = tuning_rows(read_records(path, spec), spec)
    return DataSource({"train": SourceSplit(rows, TextOptions(**options))}, _tokenizer(name))


def _checked(kind: type, values: Mapping[str, Any], known: Sequence[str], prefix: str) -> dict[str, Any]:
    problems = []
    for name in values:
        if name not in known:
            close = nearest(name, known)
            fix = f"did you mean {prefix}{close}?" if close else f"known: {', '.join(known)}"
            problems.append(Problem(prefix + name, values[name], f"is not an option; {fix}"))
    refuse(problems)
    return coerce(kind, values)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    transformers = require("transformers", "load a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer {name!r} cannot be loaded: {why_not_loaded(name, error)}") from error
