"""The metaclass that lets a dataclass, and every dataclass derived from it, take old names as well as its own.

A dataclass writes its own `__init__`, and rewrites it in each subclass; so the place that sees every construction,
and survives subclassing, is the call of the class itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from windlass.config.nearest import did_you_mean
from windlass.config.renamed import OLD_NAMES, TWINS, translate, twin_problems
from windlass.config.sections.setting import rules_of
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once

logger = get_logger(__name__)

# Names out of other libraries and of habit, which no likeness of letters leads to the right one.
HABITS = {
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "steps": "max_steps",
    "scheduler": "lr_scheduler_type",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "accumulate_grad_batches": "gradient_accumulation_steps",
}


class AcceptsOldNames(type):
    """`cls(**names)` with old names translated, unknown ones answered, and all problems raised together."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        positional = dict(zip(_positional_names(cls), args, strict=False))
        everything = {**positional, **given, **_old_fields(cls, given)}
        arguments, problems = translate(everything)
        # An old name that the class declares itself is passed on too, besides what it was translated to.
        names = known_names(cls)
        arguments.update({name: given[name] for name in OLD_NAMES if name in given and name in names})
        # `replace(args, ...)` and `cls(**args.to_dict())` give everything, which says nothing about what was asked for.
        copied = _field_names(cls) <= given.keys()
        if copied:
            _settle_twins(arguments)
        problems += twin_problems(arguments)
        if not _takes_anything(cls):
            problems += _unknown(arguments, names)
            arguments = {name: value for name, value in arguments.items() if name in names}
        keywords = {name: v for name, v in arguments.items() if name not in positional or name in given}
        instance = _construct(super().__call__, args, keywords, problems)
        instance.__dict__["_old"] = {n: v for n, v in given.items() if n in OLD_NAMES and n not in names}
        if not copied:
            _tell(cls, everything)
        return instance


def _construct(make: Any, args: tuple[Any, ...], arguments: dict[str, Any], problems: list[Problem]) -> Any:
    try:
        instance = make(*args, **arguments)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return instance


def known_names(cls: Any) -> tuple[str, ...]:
    """The names that `cls(...)` takes, in their order."""
    return _known_names(cls)


@functools.cache
def _known_names(cls: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


@functools.cache
def _positional_names(cls: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


@functools.cache
def _takes_anything(cls: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values())


@functools.cache
def _field_names(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls) if f.init)


def _old_fields(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Old names that a script declares as fields of its own subclass: their values count too."""
    fields: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
    return {name: given.get(name, field.default) for name, field in fields.items() if name in OLD_NAMES}


def _settle_twins(arguments: dict[str, Any]) -> None:
    """In a copy that changes one of two twin names the other still holds the old value: the newer name decides."""
    for old, new in TWINS.items():
        if old in arguments and new in arguments and arguments[old] != arguments[new]:
            warn_once(
                logger, f"a copy of the arguments holds two values for {old!r} and {new!r}; {new!r} decides"
            )
            arguments[old] = arguments[new]


def _unknown(arguments: Mapping[str, Any], names: tuple[str, ...]) -> list[Problem]:
    known = [*names, *OLD_NAMES]
    return [
        Problem(name, value, f"there is no such argument{did_you_mean(HABITS.get(name, name), known)}")
        for name, value in arguments.items()
        if name not in names
    ]


def _tell(cls: Any, given: Mapping[str, Any]) -> None:
    """Log once what becomes of arguments that are set to a value which does not do what their name says."""
    for name, rules in rules_of(cls).items():
        if rules.noted_at is not None and given.get(name) == rules.noted_at:
            warn_once(logger, f"the argument {name!r} is accepted, and {rules.mapped}")
