"""`windlass data show` and `prepare`: what a model gets of some samples, with the trained tokens in colour or in
brackets; and a dataset that is tokenized, and kept where training finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from windlass.config.documents import Document, parse_override
from windlass.config.values import alternatives, coerce, type_fault
from windlass.core.errors import ConfigError, DataError, Problem, refuse, unknown
from windlass.core.output import STDOUT, say, say_json
from windlass.core.types import IGNORED
from windlass.finetuning.prepared_text import prepare_kept
from windlass.recipes.built_in_recipes import is_recipe
from windlass.recipes.marked_text import BRACKETS, marked, terminal_marks
from windlass.recipes.readers import read_records
from windlass.recipes.recipe import checked_section, load_recipe, training_arguments
from windlass.recipes.recipe_draft import RecipeDraft
from windlass.recipes.schema import DataSpec, Recipe
from windlass.recipes.tasks import TASKS
from windlass.recipes.tokenizing import load_tokenizer
from windlass.recipes.tuning_data import DataSource, SourceSplit, tuning_rows
from windlass.text.encoder import RowEncoder
from windlass.text.forms import Form, LocatedRows, RowError, recognise_form, standardised
from windlass.text.summary import TextSummary
from windlass.text.text_options import TextOptions
from windlass.text.token_store import TokenStore, default_cache
from windlass.text.trained_pieces import trained_pieces

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
    of_data = [word for word in overrides if word.startswith("data.")]
    draft = RecipeDraft(Document({}))
    draft.override(of_data)
    problems = draft.problems
    data: DataSpec = checked_section(DataSpec, draft.section("data"), ("data",), draft, problems)
    refuse(problems)
    own = (parse_override(word) for word in overrides if word not in of_data)
    given = {".".join(keys): value for keys, value in own}
    name = given.pop("tokenizer", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(Problem("tokenizer", name, "must be a name or a folder; quote it to make it text"))
    options = TextOptions(**_checked(given))
    if not Path(path).exists():
        raise ConfigError(Problem("file", path, "no such file; name a recipe (*.yaml) or a file with data"))
    rows = tuning_rows(read_records(path, data), data)
    return DataSource({"train": SourceSplit(rows, options)}, None if name is None else load_tokenizer(name))


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the preparation as their types ask for them. Raises ConfigError for other names or values."""
    known = [*_NAMES, "tokenizer", "data.KEY"]
    refuse(unknown(values, known, what=f"is not an option; known: {', '.join(known)}"))
    given, hints = coerce(TextOptions, values), alternatives(TextOptions)
    faults = {name: type_fault(value, hints[name]) for name, value in given.items()}
    refuse(Problem(name, given[name], fault) for name, fault in faults.items() if fault)
    return given


_BAR = 40


def prepare_command(options: argparse.Namespace) -> int:
    source = open_source(options.source, options.overrides)
    if isinstance(source, Recipe):
        fix = "tokenizes its text when training starts, which reads nothing that was prepared; use task sft"
        raise ConfigError(Problem("task", options.source, fix))
    if source.tokenizer is None:
        raise ConfigError(Problem("tokenizer", None, "name one: tokenizer=NAME"))
    try:
        default_cache().mkdir(parents=True, exist_ok=True)
    except OSError as error:  # training goes on without, and this command would have done nothing
        fix = f"cannot hold what is prepared ({error}); set it to another folder"
        raise ConfigError(Problem("WINDLASS_HOME", str(default_cache().parent), fix)) from error
    summaries, cache = {}, TokenStore(default_cache(), must_keep=True)
    for name, split in source.splits.items():
        found = prepare_kept(split.rows, source.tokenizer, split.options, name, cache=cache)
        assert found.summary is not None
        summaries[name] = found.summary.to_dict()
        if not options.json:
            say(f"{name}: {found.summary}")
            say("\n".join(histogram_lines(found.summary)))
    if options.json:
        say_json({"kept_in": default_cache(), "splits": summaries})
    else:
        say(f"kept in {default_cache()}")
    return 0


def histogram_lines(summary: TextSummary) -> list[str]:
    """Return a line of text for each range of lengths."""
    most = max((rows for _, rows in summary.histogram), default=1)
    return [
        f"{low:>9,} to {2 * low - 1:>9,} tokens {rows:>10,} {'#' * round(_BAR * rows / most)}".rstrip()
        for low, rows in summary.histogram
    ]


_Split = TypeVar("_Split")


def show_command(options: argparse.Namespace) -> int:
    source = open_source(options.source, options.overrides, tiny=options.tiny)
    if isinstance(source, Recipe):
        _print_samples(source, options)
    else:
        _print_rows(source, options)
    return 0


def _print_samples(recipe: Recipe, options: argparse.Namespace) -> None:
    """Print samples as the collator or the model gets them."""
    task, marks = TASKS[recipe.task], BRACKETS if options.json else terminal_marks()
    parts = task.build_parts(recipe, training_arguments(recipe.training, recipe.task))
    splits = {"train": parts.train, "eval": parts.evaluation, "test": parts.test}
    samples = _chosen({name: split for name, split in splits.items() if split is not None}, options.split)
    if options.json:
        found = [
            {"sample": number, "lines": list(task.sample_lines(parts, samples[number], marks))}
            for number in _span(options, len(samples))
        ]
        say_json({"task": task.name, "count": len(samples), "classes": parts.labels, "samples": found})
        return
    kinds = f", classes: {', '.join(parts.labels)}" if parts.labels else ""
    say(f"{len(samples):,} samples for task {task.name}{kinds}")
    for number in _span(options, len(samples)):
        say(f"--- sample {number}")
        # Not `say`, which would make the colours visible as text.
        STDOUT.write("".join(f"{line}\n" for line in task.sample_lines(parts, samples[number], marks)))
    if task.marked_tokens:
        STDOUT.write(f"--- {marks[0]}marked{marks[1]} {task.marked_tokens}\n")


def _print_rows(source: DataSource, options: argparse.Namespace) -> None:
    """Print the form of rows of text, and rows as a trainer prepares them."""
    split = _chosen(source.splits, options.split)
    rows, settings = split.rows, split.options
    numbers = _span(options, len(rows))
    span = slice(numbers.start, numbers.stop)
    chosen = LocatedRows(rows[span], rows.places[span])
    form = recognise_form(chosen[0], settings.dataset_text_field)
    if source.tokenizer is None:
        found = _standard(chosen, form, settings.dataset_text_field)
    else:
        found = _prepared(chosen, form, source.tokenizer, settings, options.start)
    if options.json:
        say_json({"form": form.value, "count": len(rows), "samples": list(found)})
        return
    say(f"{len(rows):,} rows, {form.value}")
    if source.tokenizer is not None:
        _print_tokens(found)
        return
    for number, row in enumerate(found, options.start):
        say(f"--- row {number}")
        say("\n".join(_described(row)))
    say("Set tokenizer=NAME to see the tokens that a model is trained on.")


def _standard(rows: LocatedRows, form: Form, text_field: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        try:
            yield standardised(row, form, text_field, has_template=True)
        except DataError as error:
            raise RowError(number, str(error)).located(rows) from None


def _chosen(splits: Mapping[str, _Split], name: str) -> _Split:
    if name not in splits:
        raise DataError(f"there is no split {name!r}; there is: {', '.join(splits)}")
    return splits[name]


def _span(options: argparse.Namespace, count: int) -> range:
    problems = []
    if not 0 <= options.start < count:
        problems.append(
            Problem("--start", options.start, f"must be from 0 to {count - 1}: there are {count} rows")
        )
    if options.rows < 1:
        problems.append(Problem("--rows", options.rows, "must be at least 1"))
    refuse(problems)
    return range(options.start, min(options.start + options.rows, count))


def _described(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        is_chat = isinstance(value, list) and value and isinstance(value[0], Mapping)
        if is_chat and "role" in value[0]:
            yield from (f"{message['role']}: {message.get('content')}" for message in value)
        else:
            yield f"{name}: {value}"


def _prepared(
    rows: LocatedRows, form: Form, tokenizer: Any, options: TextOptions, first: int
) -> Iterator[dict[str, Any]]:
    """Rows as a trainer prepares them: `pieces` are pairs of a text and whether it is trained on."""
    try:
        encoder = RowEncoder(tokenizer, options.of_tokens(), form, rows[0])
        for at, row in enumerate(rows):
            found = encoder([row], at)
            ids, labels = ([], []) if found.dropped else (found.input_ids[0], found.labels[0])
            yield {
                "row": first + at,
                "tokens": len(ids),
                "trained": len(labels) - labels.count(IGNORED),
                "truncated": bool(found.truncated),
                "dropped": bool(found.dropped),
                "pieces": trained_pieces(ids, labels, tokenizer),
            }
    except RowError as error:
        raise error.located(rows) from None


def _print_tokens(rows: Iterable[Mapping[str, Any]]) -> None:
    marks = terminal_marks()
    for one in rows:
        cut = ", truncated" if one["truncated"] else ""
        if one["dropped"]:
            say(f"--- row {one['row']}: dropped, because it has no token to train on{cut}")
            continue
        say(f"--- row {one['row']}: {one['tokens']} tokens, {one['trained']} trained{cut}")
        # Not `say`, which would make the colours visible as text.
        STDOUT.write(marked(one["pieces"], marks) + "\n")
    sample = f"{marks[0]}trained{marks[1]}"
    STDOUT.write(f"--- {sample} tokens have a label; all others are read, and have no loss\n")
