"""What `windlass data` works on: the rows, the tokenizer and the options of a recipe or of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from windlass.cli.readers import read_records, texts
from windlass.cli.recipe import load_recipe
from windlass.cli.schema import DataSpec, Recipe
from windlass.cli.splits import load_records
from windlass.cli.tokenizing import build_tokenizer
from windlass.cli.training import training_arguments
from windlass.cli.tuning_data import load_tuning_data, tuning_rows
from windlass.config.documents import coerce, parse_override
from windlass.config.nearest import nearest
from windlass.config.refusal import refuse
from windlass.config.sft import SFTConfig
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require
from windlass.finetuning.base_model import set_special_tokens
from windlass.finetuning.prepared_text import text_options
from windlass.finetuning.sft_data import trains_on_completions
from windlass.finetuning.templates import take_over_template
from windlass.text.located_rows import LocatedRows
from windlass.text.mixture import DatasetMixture
from windlass.text.text_options import TextOptions

# Options that a command line cannot hold.
_CODE_ONLY = ("formatting_func",)
_NAMES = tuple(item.name for item in fields(TextOptions) if item.name not in _CODE_ONLY)


@dataclass(frozen=True, slots=True)
class SourceSplit:
    """Rows, and what they are prepared with."""

    rows: LocatedRows
    options: TextOptions


@dataclass(frozen=True, slots=True)
class DataSource:
    """Splits by name.

    Attributes:
        tokenizer: None if none was named.
        is_kept: training reads prepared text.
    """

    splits: dict[str, SourceSplit]
    tokenizer: Any
    is_kept: bool = True


def open_source(path: str, overrides: Sequence[str]) -> DataSource:
    """Read the data of a recipe (`*.yaml`) or of a file.

    Args:
        overrides: of a recipe: keys of the recipe. Of a file: `tokenizer=NAME`, `data.KEY=...`, and options of the
            preparation, such as `max_length=512`.

    Raises:
        ConfigError: an override is not known. DataError: the file cannot be read.
    """
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return _of_recipe(path, overrides)
    return _of_file(path, overrides)


def _of_recipe(path: str, overrides: Sequence[str]) -> DataSource:
    recipe = load_recipe(path, overrides)
    if recipe.task == "sft":
        return _of_tuning(recipe)
    train, held = load_records(recipe, training_arguments(recipe.training, recipe.task).seed)
    column = recipe.data.text_column
    is_text = all(column in record for _, record in train)
    tokenizer = build_tokenizer(recipe, texts(train, column) if is_text else [])
    options = TextOptions(dataset_text_field=column)
    if recipe.task == "classification":
        options = replace(options, max_length=recipe.data.max_length)
    splits = {"train": train, "eval": held}
    return DataSource(
        {
            name: SourceSplit(LocatedRows((r for _, r in records), (w for w, _ in records)), options)
            for name, records in splits.items()
            if records
        },
        tokenizer,
        is_kept=False,
    )


def _of_tuning(recipe: Recipe) -> DataSource:
    """What `SFTTrainer` will prepare, in the same way, so that it finds the result."""
    args = training_arguments(recipe.training, recipe.task)
    assert isinstance(args, SFTConfig)
    data = load_tuning_data(recipe, args.seed)
    take_over_template(args.chat_template_path, data.tokenizer)
    set_special_tokens(data.tokenizer, args)

    def split(rows: Any, packing: bool) -> SourceSplit:
        return SourceSplit(
            rows, text_options(args, packing, trains_on_completions(args, rows, formatted=False))
        )

    sources: Mapping[str, Any] = {"train": data.train}
    if isinstance(data.train, DatasetMixture):
        sources = {f"train {name}": rows for name, rows in data.train.sources.items()}
    splits = {name: split(rows, args.packing) for name, rows in sources.items()}
    if data.evaluation:
        splits["eval"] = split(data.evaluation, args.packs_evaluation)
    return DataSource(splits, data.tokenizer)


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
        raise ModelError(f"the tokenizer {name!r} cannot be loaded: {error}") from error
