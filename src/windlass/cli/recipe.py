"""Read a recipe into a checked `Recipe`; all problems are found in one pass, each with place and fix."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from windlass.cli.checks import find_conflicts
from windlass.cli.recipe_draft import RecipeDraft
from windlass.cli.schema import NESTED, Recipe, field_names
from windlass.cli.training import coerced, merge_parallel, training_fields, training_problems
from windlass.config.documents import Keys
from windlass.config.nearest import nearest
from windlass.config.refusal import refuse
from windlass.config.sections.setting import rules_in
from windlass.config.values import choice_fault, type_fault
from windlass.core.errors import Problem


def load_recipe(
    path: str | Path | None, overrides: Sequence[str] = (), output_dir: str | None = None
) -> Recipe:
    """Read a recipe file (the built-in one for None), apply `key=value` overrides, and check the result.

    Args:
        path: YAML file; data paths in it are relative to the working directory.
        overrides: dotted keys, such as `data.train=my.txt` or `training.learning_rate=1e-3`.
        output_dir: overrides `training.output_dir`; the default is `runs/<name of the recipe>`.

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
    training, unfit = merge_parallel(recipe.training, recipe.parallel, draft)
    problems += unfit
    if recipe.task == "seq2seq":
        training.setdefault("predict_with_generate", recipe.metric is not None)
    recipe = replace(recipe, training=training)
    problems += [conflict for conflict in find_conflicts(recipe, draft) if not _follows(conflict, problems)]
    problems += training_problems(recipe.training, recipe.task, draft)
    refuse(problems)
    return replace(recipe, training=coerced(recipe.training, recipe.task))


def _own_data(draft: RecipeDraft, overrides: Sequence[str]) -> str | None:
    """Let data given as an override replace the text of the built-in recipe; return its path, or None."""
    data = draft.values.get("data")
    own = data.get("train") if isinstance(data, dict) else None
    if not own:
        return None
    if not any(override.startswith("data.format=") for override in overrides):
        draft.put(("data", "format"), "auto")
    return str(own)


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


def _section(
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
                values[key] = _section(NESTED[kind, key], value, here, draft, problems)
            else:
                keys = ", ".join(field_names(NESTED[kind, key]))
                problems.append(Problem(label, value, f"must be a section with keys out of: {keys}"))
        else:
            value = float(value) if hints[key] is float and not type_fault(value, float) else value
            if fix := _mismatch(value, hints[key], known[key]):
                problems.append(Problem(label, value, fix))
            else:
                values[key] = value
    return kind(**values)


def _unknown(key: str, path: Keys, known: Iterable[str]) -> str:
    if close := nearest(key, known):
        return f"no such key; did you mean {'.'.join((*path, close))}?"
    everywhere: dict[str, Keys] = {}
    sections = [*_all_keys(Recipe, ()), *(("training", name) for name in training_fields())]
    for keys in sorted(sections, key=lambda keys: keys[0] == "base"):  # which repeats keys of `training`
        everywhere.setdefault(keys[-1], keys)
    elsewhere = everywhere.get(key) or everywhere.get(nearest(key, everywhere) or "")
    if elsewhere:
        return f"no such key here; did you mean {'.'.join(elsewhere)}?"
    return f"no such key; known here: {', '.join(known)}"


def _all_keys(kind: type, path: Keys) -> Iterator[Keys]:
    for name in field_names(kind):
        yield (*path, name)
    for name in field_names(kind):
        if (kind, name) in NESTED:
            yield from _all_keys(NESTED[kind, name], (*path, name))


def _mismatch(value: Any, hint: Any, item: Field[Any]) -> str | None:
    """Return what is wrong with `value` for a field of type `hint`, or None."""
    if fault := type_fault(value, hint):
        is_number = hint is str and isinstance(value, int | float)
        return f"{fault}; quote it to make it text" if is_number else fault
    choices, bounds = item.metadata.get("choices"), rules_in(item).bounds
    if choices:
        return None if value is None else choice_fault(value, choices)
    return bounds.words if bounds and value is not None and not bounds.holds(value) else None
