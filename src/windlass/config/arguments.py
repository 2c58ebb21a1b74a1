"""`TrainingArguments`: all settings of a run, as one object of plain data.

It makes no folder, touches no device and does not write the environment. Scripts may assign to it; each `train()` and
`evaluate()` checks it again as a whole.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.config.accepting import BOTH_WAYS, OLD_NAMES, AcceptsOldNames, announce, translate
from windlass.config.helpers import Helpers
from windlass.config.kinds import mapping
from windlass.config.sections.setting import default_of, described, rules_of
from windlass.config.setters import Setters
from windlass.config.validate import check
from windlass.core.errors import refuse
from windlass.core.locations import working_folder


@described()
@dataclass(repr=False)
class TrainingArguments(Helpers, Setters, metaclass=AcceptsOldNames):
    """The settings of a run. Scripts may subclass it as a dataclass.

    Names of earlier versions (`evaluation_strategy`, `warmup_ratio`, ...) are accepted with one warning each, also when
    read or assigned later.

    Raises:
        ConfigError: everything that is wrong, at once: unknown names (with the nearest known one), wrong types, values
            out of range, contradictions, and features that are not built.
    """

    # Fields that may be given as JSON text. Subclasses of scripts add their own to it.
    _VALID_DICT_FIELDS: ClassVar[list[str]]

    def __post_init__(self) -> None:
        check(self)
        self.__dict__["_dividing"] = self._divide_new_models()

    def _assign(self, name: str, value: Any) -> None:
        if name in OLD_NAMES and name not in self.__dataclass_fields__:
            self._assign_old(name, value)
            return
        if name == "output_dir":
            self.__dict__["_base"] = working_folder()
        derived = self.__dict__.get("_derived")
        if derived is not None:
            # After construction: an assigned value is given, no longer derived, and both names of a choice stay equal.
            self.__dict__["_given"] = self.__dict__.get("_given", frozenset()) | {name}
            if name in derived:  # a new dict, because a shallow copy of the arguments shares the old one
                self.__dict__["_derived"] = {n: said for n, said in derived.items() if n != name}
            if name in (sources := self.__dict__.get("_sources", {})):
                self.__dict__["_sources"] = {n: place for n, place in sources.items() if n != name}
            if name in BOTH_WAYS:
                object.__setattr__(self, BOTH_WAYS[name], value)
        object.__setattr__(self, name, value)

    def _read_old(self, name: str) -> Any:
        # Only called for names that are not attributes: an old name reads the field that replaced it.
        old = OLD_NAMES.get(name)
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if old.new is None:
            return self.__dict__.get("_old", {}).get(name, old.default)
        return old.back(getattr(self, old.new))

    if not TYPE_CHECKING:  # type checkers would take every misspelled name for an attribute
        __setattr__ = _assign
        __getattr__ = _read_old

    def is_given(self, name: str) -> bool:
        """Return True if `name` was given to the constructor, or assigned later, with whatever value. False in a copy
        made of all values, which does not show what was requested.
        """
        return name in self.__dict__.get("_given", ())

    def group_options(self) -> dict[str, dict[str, Any]]:
        """The pattern of names of parameters -> the options of their group in the optimizer."""
        return mapping(self.optim_groups)

    def _assign_old(self, name: str, value: Any) -> None:
        old = OLD_NAMES[name]
        if old.new is None or old.says_nothing(value):
            _, problems = translate({name: value})
            refuse(problems)
            self.__dict__["_old"] = {**self.__dict__.get("_old", {}), name: value}
            if old.new is not None and type(old.default) is type(value) is bool:
                setattr(self, old.new, default_of(self.__dataclass_fields__[old.new]))
            return
        announce(name)
        setattr(
            self, old.new, old.carry(value, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        )

    def __repr__(self) -> str:
        """The arguments that differ from their defaults; `str(args)` lists all."""
        given = ", ".join(f"{name}={value!r}" for name, value, default in describe(self) if not default)
        return f"{type(self).__name__}({given})"

    def __str__(self) -> str:
        lines = "".join(f"  {name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"


TrainingArguments._VALID_DICT_FIELDS = [
    name for name, rule in rules_of(TrainingArguments).items() if rule.document
]


def describe(args: TrainingArguments) -> list[tuple[str, Any, bool]]:
    """Each argument as (name, value, is default), in the order of the fields; secrets are masked.

    A value that was derived from other arguments counts as default.
    """
    values = args.to_dict()
    plain = next(cls for cls in type(args).__mro__ if _needs_nothing(cls))().to_dict()
    derived = args.__dict__.get("_derived", {})
    return [(n, v, n in derived or (n in plain and plain[n] == v)) for n, v in values.items()]


def note_sources(
    args: TrainingArguments, sources: Mapping[str, str], others: Mapping[str, tuple[Any, str]] | None = None
) -> None:
    """Record where arguments were set, for `source_of`. One that is assigned later was set by the script.

    Args:
        sources: by name, such as `recipe.yaml:12` or `the command line`.
        others: settings beside the arguments, such as the keys of a recipe: name -> (value, source).
    """
    args.__dict__["_sources"] = {**args.__dict__.get("_sources", {}), **sources}
    args.__dict__["_others"] = {**args.__dict__.get("_others", {}), **(others or {})}


def source_of(args: TrainingArguments, name: str) -> str:
    """Return where an argument that differs from its default was set: the script, unless `note_sources` knows."""
    return str(args.__dict__.get("_sources", {}).get(name, "the script"))


def settings_beside(args: TrainingArguments) -> dict[str, tuple[Any, str]]:
    """Return the settings of `note_sources` that are not arguments: name -> (value, source)."""
    return dict(args.__dict__.get("_others", {}))


def shared_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that must be the same on all ranks. Fields of a script's subclass are not compared."""
    values = args.to_dict()
    rules = rules_of(type(args)).items()
    return {name: values[name] for name, rule in rules if not rule.per_rank and name in values}


def _needs_nothing(cls: type) -> bool:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        p.default is not p.empty or p.kind in optional for p in inspect.signature(cls).parameters.values()
    )
