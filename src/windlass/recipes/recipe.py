"""Read a recipe into a checked `Recipe`, and its sections `training` and `parallel` into arguments; all problems are
found in one pass, each with place and fix.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from windlass.config.arguments import TrainingArguments, describe, note_sources
from windlass.config.documents import Keys
from windlass.config.kinds import number
from windlass.config.parallel.keys import Setting
from windlass.config.parallel.rows_deepspeed import CONFIG, FIELDS
from windlass.config.parallel.rows_training import STRATEGY
from windlass.config.parallel.table import KEYS, to_arguments
from windlass.config.sections.setting import rules_in
from windlass.config.values import coerce, members, type_fault, value_fault
from windlass.core.errors import ConfigError, Problem, nearest, refuse
from windlass.core.locations import local_folder
from windlass.core.optional import check_installed
from windlass.recipes.argument_table import Argument, all_arguments
from windlass.recipes.built_in_recipes import DEFAULT, FOLDER
from windlass.recipes.checks import ask_libraries, evaluates, find_conflicts
from windlass.recipes.from_files import from_recipe
from windlass.recipes.recipe_draft import RecipeDraft
from windlass.recipes.schema import BUILT_IN, ENDINGS, NESTED, PATHLESS, Recipe, field_names
from windlass.recipes.tasks import TASKS

_ONLY_AT_LAUNCH = "is set when the processes are started: `windlass launch` with the flag or a launch file"


def training_fields() -> list[str]:
    """Return the keys of the `training` section of any task."""
    return [argument.keys[-1] for argument in all_arguments() if argument.is_training]


def coerced(values: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Convert text to the number or bool that a field requires."""
    return coerce(TASKS[task].arguments, values)


def training_arguments(values: Mapping[str, Any], task: str) -> TrainingArguments:
    """Return the arguments of a checked recipe, of the class that the task has."""
    return TASKS[task].arguments(**coerced(values, task))


def run_folder(args: TrainingArguments) -> Path:
    """Return the output folder, which a recipe always has."""
    assert args.output_dir is not None
    return local_folder(args.output_path)


def training_problems(values: Mapping[str, Any], task: str, draft: RecipeDraft) -> list[Problem]:
    """Return the problems that the task's arguments report, with the place in the recipe."""
    foreign = values.keys() & set(training_fields()) - {item.name for item in fields(TASKS[task].arguments)}
    if foreign:
        fix = f"has no meaning for task {task}; leave it out"
        return [Problem(draft.label("training", name), values[name], fix) for name in sorted(foreign)]
    try:
        training_arguments(values, task)
    except ConfigError as error:
        return [
            Problem(draft.label("training", *problem.field.split(".")), problem.value, problem.fix)
            for problem in error.problems
        ]
    return []


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section; values of `other` replace those of `one`."""
    found = dict(one)
    for name, value in other.items():
        inner = found.get(name)
        found[name] = (
            _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return found


def _differing(one: Any, other: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value in `one` of each value that both have, and that differs."""
    for name, value in other.items() if isinstance(one, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _differing(one.get(name), value, f"{before}{name}.")
        elif one.get(name, value) != value:
            yield f"{before}{name}", one[name]


def merge_parallel(
    training: Mapping[str, Any], parallel: Mapping[str, Any], draft: RecipeDraft
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the `training` section with the settings of `parallel` added, and the problems of the latter."""

    def problem(setting: Setting, fix: str) -> Problem:
        return Problem(draft.label("parallel", *setting.key.split(".")), setting.value, fix)

    settings = from_recipe(parallel, "recipe")
    problems = [
        Problem(draft.label(*found.field.partition(" in ")[0].split(".")), found.value, found.fix)
        for found in settings.problems
    ]
    joined = dict(training)
    if CONFIG.name in settings:
        fix = "configures DeepSpeed as a whole: set these values there, or leave it out"
        problems += [
            problem(found, f"contradicts parallel.{CONFIG.name}, which {fix}")
            for found in settings.explicit(*FIELDS)
        ]
    # The strategy first: what else is set of DeepSpeed replaces its defaults.
    for setting in sorted(settings.values(), key=lambda found: found.key != STRATEGY.name):
        if setting.key == STRATEGY.name and training.get("deepspeed"):
            continue  # which has it all, and not the defaults
        arguments = to_arguments(KEYS[setting.key], setting.value)
        if not arguments:
            problems.append(problem(setting, _ONLY_AT_LAUNCH))
        for name, value in arguments.items():
            if isinstance(value, dict):
                given = training.get(name) or {}
                if isinstance(given, str):
                    problems.append(problem(setting, f"belongs into {given}, which training.{name} names"))
                    continue
                problems += [
                    problem(setting, f"contradicts training.{name}.{key}={own!r}; set only one")
                    for key, own in _differing(given, value)
                ]
                value = _merged(joined.get(name) or {}, value)
            elif joined.get(name, value) != value:
                problems.append(
                    problem(setting, f"contradicts training.{name}={joined[name]!r}; set only one")
                )
            joined[name] = value
    return joined, problems


def load_recipe(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    *,
    tiny: bool = False,
    asks_libraries: bool = True,
) -> Recipe:
    """As `open_recipe`, without where its values were set."""
    return open_recipe(path, overrides, output_dir, tiny=tiny, asks_libraries=asks_libraries)[0]


def open_recipe(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    *,
    tiny: bool = False,
    asks_libraries: bool = True,
) -> tuple[Recipe, RecipeDraft]:
    """Read a recipe, apply `key=value` overrides, and check the result; return it, and where its values were set.
    Raises ConfigError with all problems found.

    Args:
        path: YAML file, or the name of a built-in recipe; None: the default one. Data paths in it are relative to the
            working directory.
        overrides: dotted keys, such as `data.train=my.txt` or `training.learning_rate=1e-3`.
        output_dir: overrides `training.output_dir`; the default is `runs/<name of the recipe>`.
        tiny: shrink the recipe, so that it runs anywhere in seconds; see `tiny`.
        asks_libraries: let the libraries check the parts that they read, if nothing else is wrong.
    """
    draft = read_draft(path, overrides, output_dir)
    if tiny:
        from windlass.recipes.tiny import shrink

        check_installed("transformers", "run a recipe", extra="train")
        wrong: list[Problem] = []
        checked_section(Recipe, draft.values, (), draft, wrong)
        if not wrong:  # else a value may be of any type; the check of the whole reports them with all others
            shrink(draft)
    return check_draft(draft, asks_libraries=asks_libraries), draft


def read_draft(
    path: str | Path | None, overrides: Sequence[str] = (), output_dir: str | None = None
) -> RecipeDraft:
    """Return the values of a recipe and where each was set, of which only the types of keys are checked; the arguments
    are those of `load_recipe`.
    """
    draft = RecipeDraft.read(path or DEFAULT)
    draft.override(overrides)
    refuse(draft.wrong_keys())
    draft.expand_home()
    if output_dir is not None:
        draft.put(("training", "output_dir"), output_dir)
    own = _own_data(draft)
    _name_the_run(draft, Path(path or own or DEFAULT).stem)
    return draft


def check_draft(draft: RecipeDraft, *, opens_files: bool = True, asks_libraries: bool = False) -> Recipe:
    """Return the checked recipe; without `opens_files` the data and models that it names need not exist. Raises
    ConfigError with all problems found.
    """
    problems = list(draft.problems)
    recipe: Recipe = checked_section(Recipe, draft.values, (), draft, problems)
    training, unfit = merge_parallel(recipe.training, recipe.parallel, draft)
    problems += unfit
    defaults = TASKS[recipe.task].training_defaults(recipe)
    if recipe.early_stopping is not None and evaluates(training):
        defaults = {"load_best_model_at_end": True, **defaults}
    # Below what the recipe sets itself; conflicts and problems are those of the result.
    recipe = replace(recipe, training={**defaults, **training})
    conflicts = find_conflicts(recipe, draft, opens_files)
    problems += [conflict for conflict in conflicts if not _follows(conflict, problems)]
    training = recipe.training
    if "task" in map(_dotted, problems):
        # Keys of the task that is meant would be compared with those of another.
        of_tasks = set(training_fields()) - {item.name for item in fields(TrainingArguments)}
        training = {name: value for name, value in training.items() if name not in of_tasks}
    problems += training_problems(training, recipe.task, draft)
    refuse(problems)
    if asks_libraries:
        refuse(ask_libraries(recipe, draft))
    return replace(recipe, training=coerced(recipe.training, recipe.task))


def _own_data(draft: RecipeDraft) -> str | None:
    """Let a file that is given as an override replace data that is not a file; return its path, or None without one."""
    data = draft.values.get("data")
    if not isinstance(data, dict) or not data.get("train") or not draft.is_overridden("data", "train"):
        return None
    own, kind = str(data["train"]), data.get("format")
    # A file that does not exist is one by its name: datasets of a hub have no such ending.
    if kind in BUILT_IN or (kind in PATHLESS and (os.path.exists(own) or Path(own).suffix in ENDINGS)):
        for key in ("format", "subset", "split", "eval_split", "test_split"):
            if not draft.is_overridden("data", key):
                data.pop(key, None)
    return own


def _follows(conflict: Problem, problems: list[Problem]) -> bool:
    """Return True if the conflict follows from a value that is invalid and was replaced by its default."""
    about = _dotted(conflict)
    return any(_dotted(p) == about or _dotted(p).startswith(about + ".") for p in problems)


def _dotted(problem: Problem) -> str:
    return problem.field.rpartition(": ")[2]


def _name_the_run(draft: RecipeDraft, name: str) -> None:
    training = draft.values.setdefault("training", {})
    if isinstance(training, dict):
        training.setdefault("output_dir", f"runs/{name}")
        training.setdefault("log_level", "warning")  # the command prints its own messages


def checked_section(
    kind: type, tree: Mapping[str, Any], path: Keys, draft: RecipeDraft, problems: list[Problem]
) -> Any:
    """Build dataclass `kind` from `tree`; invalid values are added to `problems` and replaced by the default."""
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        here = (*path, key)
        label = draft.label(*here)
        if key not in known:
            problems.append(Problem(label, value, _unknown(key, path, known)))
        elif value is not None and (kind, key) in NESTED:
            if isinstance(value, Mapping):
                values[key] = checked_section(NESTED[kind, key], value, here, draft, problems)
            else:
                keys = ", ".join(field_names(NESTED[kind, key]))
                problems.append(Problem(label, value, f"must be a section with keys out of: {keys}"))
        else:
            value = number(value) if hints[key] is float and not type_fault(value, (float,)) else value
            if fix := _mismatch(value, hints[key], known[key]):
                problems.append(Problem(label, value, fix))
            else:
                values[key] = value
    return kind(**values)


def _unknown(key: str, path: Keys, known: Iterable[str]) -> str:
    if "." in key:
        first, _, rest = key.partition(".")
        return f"a key of a file names one level; write it as {first}: {{{rest}: ...}}"
    if close := nearest(key, known):
        return f"no such key; did you mean {'.'.join((*path, close))}?"
    if elsewhere := find_key(key):
        return f"no such key here; did you mean {'.'.join(elsewhere)}?"
    return f"no such key; known here: {', '.join(known)}"


def find_key(name: str) -> Keys | None:
    """Return the key whose last part is `name`, else the one that is most similar; None if none is similar."""
    everywhere: dict[str, Keys] = {}
    # Keys of `base` last: they repeat some of `training`.
    for argument in sorted(all_arguments(), key=lambda found: (found.keys[0] == "base", found.is_training)):
        everywhere.setdefault(argument.keys[-1], argument.keys)
    # The same name at another place is more likely than another name.
    return everywhere.get(name) or everywhere.get(nearest(name, everywhere) or "")


def _mismatch(value: Any, hint: Any, item: Field[Any]) -> str | None:
    """Return what is wrong with `value` for a field of type `hint`, or None."""
    # The schema does not know the tasks, which know it.
    choices = tuple(TASKS) if item.name == "task" else item.metadata.get("choices")
    fault = value_fault(value, members(hint), rules_in(item), choices)
    is_number = hint is str and isinstance(value, int | float)
    return f"{fault}; quote it to make it text" if fault and is_number else fault


# Of values that no key of the recipe sets: a task has defaults of its own, and a run needs a folder.
_COMMAND = "windlass train"


def note_recipe(args: TrainingArguments, recipe: Recipe, draft: RecipeDraft) -> None:
    """Record in the arguments of a recipe where each was set, and its other keys that differ from their defaults."""
    of_training = {name: _shown(place) for name, place in _training(args, recipe, draft)}
    others = {one.dotted: (value, _shown(_origin(draft, one))) for one, value in _others(recipe)}
    note_sources(args, of_training, others)


def _shown(origin: str) -> str:
    """A place in a built-in recipe by its name alone: `python-docs.yaml:12`."""
    return origin.removeprefix(f"{FOLDER}{os.sep}")


def _training(args: TrainingArguments, recipe: Recipe, draft: RecipeDraft) -> Iterator[tuple[str, str]]:
    spread = dict(_parallel(recipe, draft))
    of_task = TASKS[recipe.task].training_defaults(recipe)
    for name, _, is_default in describe(args):
        if not is_default:
            unset = f"task {recipe.task}" if name in of_task else _COMMAND
            yield name, draft.origin("training", name) or spread.get(name) or unset


def _parallel(recipe: Recipe, draft: RecipeDraft) -> Iterator[tuple[str, str]]:
    """Yield the arguments that the section `parallel` sets, and where."""
    for setting in from_recipe(recipe.parallel, "recipe").values():
        keys = ("parallel", *setting.key.split("."))
        origin = draft.origin(*keys) or draft.origin("parallel")
        if origin is not None:
            yield from ((name, origin) for name in to_arguments(KEYS[setting.key], setting.value))


def _others(recipe: Recipe) -> Iterator[tuple[Argument, Any]]:
    """Yield the keys outside `training` whose values differ from their defaults."""
    for argument in all_arguments(recipe.task):
        if argument.is_training or argument.keys[0] == "parallel":
            continue
        value = argument.value_in(recipe)
        if not is_dataclass(value) and value is not None and value != argument.default:
            yield argument, value


def _origin(draft: RecipeDraft, argument: Argument) -> str:
    """Return where a key, or the section that it is in, was set."""
    depths = range(len(argument.keys), 0, -1)
    return next((found for depth in depths if (found := draft.origin(*argument.keys[:depth]))), _COMMAND)
