"""Every key of a recipe with its description: those of its sections, and the arguments of `training`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any

from windlass.config.accepting import OLD_NAMES
from windlass.config.arguments import TrainingArguments
from windlass.config.documents import Keys
from windlass.config.enums import OPTIMIZERS, OptimizerNames
from windlass.config.sections.setting import default_of, rules_in
from windlass.config.values import members
from windlass.recipes.schema import NESTED, Recipe
from windlass.recipes.tasks import TASKS

_TRAINING = "training"
_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
    NoneType: "null",
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One key of a recipe."""

    keys: Keys  # its place in a recipe: ("training", "learning_rate")
    owner: type  # the dataclass that declares it
    field: dataclasses.Field[Any]  # its declaration

    @property
    def dotted(self) -> str:
        return ".".join(self.keys)

    @property
    def is_training(self) -> bool:
        """Return True for a field of `TrainingArguments` or of a subclass."""
        return self.keys[0] == _TRAINING

    @property
    def default(self) -> Any:
        return default_of(self.field)

    @property
    def doc(self) -> str:
        return str(self.field.metadata.get("help", ""))

    @property
    def readers(self) -> list[str]:
        """The tasks that read it, if not all do."""
        if self.is_training:
            names = [name for name, task in TASKS.items() if issubclass(task.arguments, self.owner)]
            return [] if self.owner is TrainingArguments else names
        return [
            name
            for name, task in TASKS.items()
            if self.dotted in task.own_keys or self.keys[0] in task.own_keys
        ]

    @property
    def earlier_names(self) -> list[str]:
        """Names that are accepted for it in scripts."""
        if not self.is_training:
            return []
        renamed = [
            old for old, now in getattr(self.owner, "EARLIER_NAMES", {}).items() if now == self.keys[-1]
        ]
        return renamed + [name for name, old in OLD_NAMES.items() if old.new == self.keys[-1]]

    def value_in(self, recipe: Recipe) -> Any:
        """Return its value outside `training`; None below a section that is absent."""
        value: Any = recipe
        for name in self.keys:
            value = getattr(value, name, None)
        return value

    def values(self) -> tuple[str, ...]:
        """Return the words that it may be; empty if they are not listed."""
        rules, kinds = rules_in(self.field), self.kinds()
        if self.dotted == "task":
            return tuple(TASKS)  # the schema does not know the tasks, which know it
        if OptimizerNames in kinds:
            return OPTIMIZERS  # the names that are built
        listed = tuple(member.value for kind in kinds if issubclass(kind, Enum) for member in kind)
        return tuple(self.field.metadata.get("choices") or rules.words or listed)

    def type_in_words(self) -> str:
        """Return its type and bounds, as "a number; must be at least 0"."""
        words = dict.fromkeys(_TYPES[kind] for kind in self.kinds() if kind in _TYPES)
        bounds = rules_in(self.field).bounds
        return " or ".join(words) + (f"; {bounds.words}" if bounds else "")

    def kinds(self) -> list[type]:
        """Return the types that it may have, without those of items; None is `NoneType`."""
        found: list[type] = []
        for kind in members(typing.get_type_hints(self.owner)[self.field.name]):
            plain = typing.get_origin(kind) or kind
            found += [plain] if isinstance(plain, type) else [bool] if plain is typing.Literal else []
        return found


def all_arguments(task: str | None = None) -> Iterator[Argument]:
    """Yield each key of a recipe: those of `training` first, of all tasks or as the arguments of one task have them."""
    kinds: list[type[TrainingArguments]] = [TrainingArguments, *(known.arguments for known in TASKS.values())]
    seen: set[str] = set()
    for kind in kinds if task is None else [TASKS[task].arguments]:
        for item in dataclasses.fields(kind):
            if item.init and item.name not in seen:
                seen.add(item.name)
                yield Argument((_TRAINING, item.name), kind, item)
    yield from _below(Recipe, ())


def _below(kind: Any, path: Keys) -> Iterator[Argument]:
    for item in dataclasses.fields(kind):
        if not path and item.name == _TRAINING:
            continue
        yield Argument((*path, item.name), kind, item)
        if inner := NESTED.get((kind, item.name)):
            yield from _below(inner, (*path, item.name))


def find_arguments(word: str, task: str | None = None) -> list[Argument]:
    """Return the keys that `word` names: a dotted key, the last part of one, or an earlier name of one."""
    known = list(all_arguments(task))
    # An earlier name may be another argument's name of today, which is what is meant then.
    exact = [argument for argument in known if word in (argument.dotted, argument.keys[-1])]
    return exact or [argument for argument in known if word in argument.earlier_names]
