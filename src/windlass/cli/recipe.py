"""From a recipe's text to a checked `Recipe`: all problems found in one pass, each with place and fix."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from windlass.cli.checks import find_conflicts
from windlass.cli.parallel import spread
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import NESTED, Recipe, field_names
from windlass.cli.training import coerced, training_fields, training_problems
from windlass.config.documents import Keys
from windlass.config.nearest import did_you_mean, nearest
from windlass.config.sections.setting import rules_in
from windlass.core.errors import ConfigError, Problem


def load_recipe(
    path: str | Path | None, overrides: Sequence[str] = (), output_dir: str | None = None
) -> Recipe:
    """Read a recipe file (the built-in one for None), lay `key=value` overrides over it, and check the whole.

    Args:
        path: YAML file; data paths in it are relative to the working directory, as they are on the command line.
        overrides: dotted keys, such as `data.train=my.txt` or `training.learning_rate=1e-3`.
        output_dir: wins over `training.output_dir`; without either the run goes to `runs/<name of the recipe>`.

    Raises:
        ConfigError: with all problems found.
    """
    draft = RecipeDraft.read(path)
    draft.override(overrides)
    if output_dir is not None:
        draft.put(("training", "output_dir"), output_dir)
    own = _own_data(draft, overrides) if path is None else None
    _name_the_run(draft, Path(path or own or "python-docs").stem)
    problems = list(draft.problems)
    recipe: Recipe = _section(Recipe, draft.values, (), draft, problems)
    training, unfit = spread(recipe.training, recipe.parallel, draft)
    problems += unfit
    recipe = replace(recipe, training=training)
    conflicts = [*find_conflicts(recipe, draft), *_evaluation_problems(recipe, draft)]
    problems += [conflict for conflict in conflicts if not _follows(conflict, problems)]
    problems += training_problems(recipe.training, draft)
    if problems:
        raise ConfigError(problems)
    return replace(recipe, training=coerced(recipe.training))


def _own_data(draft: RecipeDraft, overrides: Sequence[str]) -> str | None:
    """Data laid over the built-in recipe takes the place of its text; gives where it is, None where there is none."""
    data = draft.values.get("data")
    own = data.get("train") if isinstance(data, dict) else None
    if not own:
        return None
    if not any(override.startswith("data.format=") for override in overrides):
        draft.put(("data", "format"), "auto")
    return str(own)


def _follows(conflict: Problem, problems: list[Problem]) -> bool:
    """Whether a value that is wrong by itself, and was replaced by its default, explains the conflict."""
    about = _dotted(conflict)
    return any(_dotted(p) == about or _dotted(p).startswith(about + ".") for p in problems)


def _dotted(problem: Problem) -> str:
    return problem.field.rpartition(": ")[2]


def _evaluation_problems(recipe: Recipe, draft: RecipeDraft) -> list[Problem]:
    """A run that is to evaluate, on nothing."""
    data, strategy = recipe.data, recipe.training.get("eval_strategy", "no")
    has_none = data.eval is None and data.eval_split is None and data.eval_fraction == 0
    if not has_none or strategy in ("no", False, None):
        return []
    fix = "needs data to evaluate on: data.eval, or data.eval_fraction above 0"
    return [Problem(draft.label("training", "eval_strategy"), strategy, fix)]


def _name_the_run(draft: RecipeDraft, name: str) -> None:
    training = draft.values.setdefault("training", {})
    if isinstance(training, dict):
        training.setdefault("output_dir", f"runs/{name}")
        training.setdefault("log_level", "warning")  # the command says itself what it does


def _section(
    kind: type, tree: Mapping[str, Any], path: Keys, draft: RecipeDraft, problems: list[Problem]
) -> Any:
    """Build dataclass `kind` from `tree`; what is wrong goes to `problems`, and the default stands in for it."""
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
                values[key] = _section(NESTED[kind, key], value, here, draft, problems)
            else:
                keys = ", ".join(field_names(NESTED[kind, key]))
                problems.append(Problem(label, value, f"must be a section with keys out of: {keys}"))
        else:
            value = float(value) if hints[key] is float and _fits(value, float) else value
            fix = _mismatch(value, hints[key], known[key])
            if fix:
                problems.append(Problem(label, value, fix))
            else:
                values[key] = value
    return kind(**values)


def _unknown(key: str, path: Keys, known: Iterable[str]) -> str:
    close = nearest(key, known)
    if close:
        return f"no such key; did you mean {'.'.join((*path, close))}?"
    elsewhere = [".".join(full) for full in _all_keys() if full[-1] == key]
    if not elsewhere:
        close = nearest(key, [full[-1] for full in _all_keys()])
        elsewhere = [".".join(full) for full in _all_keys() if full[-1] == close]
    if elsewhere:
        return f"no such key here; did you mean {elsewhere[0]}?"
    return f"no such key; known here: {', '.join(known)}"


def _all_keys() -> list[Keys]:
    keys: list[Keys] = []
    sections: list[tuple[type, Keys]] = [(Recipe, ())]
    while sections:
        kind, path = sections.pop(0)
        for name in field_names(kind):
            keys.append((*path, name))
            if (kind, name) in NESTED:
                sections.append((NESTED[kind, name], (*path, name)))
    return keys + [("training", name) for name in training_fields()]


_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _mismatch(value: Any, hint: Any, item: Field[Any]) -> str | None:
    """What is wrong with `value` for a field of type `hint`, or None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        return None if types.NoneType in options else f"must not be empty; it is {_describe(options[0])}"
    kind, choices, bounds = options[0], item.metadata.get("choices"), rules_in(item).bounds
    if not _fits(value, kind):
        quote = "; quote it to make it text" if kind is str and isinstance(value, int | float) else ""
        return f"must be {_describe(kind)}{quote}"
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}{did_you_mean(value, choices)}"
    return bounds.words if bounds and not bounds.holds(value) else None


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, typing.get_origin(kind) or kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return "a list of texts: [text, label]"
    return _PLAIN.get(kind, "a mapping of keys to values")
