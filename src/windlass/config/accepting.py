"""The metaclass that lets a dataclass, and each dataclass derived from it, accept old names.

A dataclass generates `__init__` again in each subclass, so only the call of the class sees all constructions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from windlass.config.nearest import did_you_mean
from windlass.config.refusal import refuse
from windlass.config.renamed import OLD_NAMES, TWINS, translate, twin_problems
from windlass.config.sections.setting import default_of, rules_of
from windlass.config.values import hints
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import warn_of_argument

# Names of other libraries, which are not similar to the right ones.
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
# Arguments of other classes that people look for in this one.
_ANSWERS = (
    "is of trainers that know the prompts of their rows: use SFTConfig with SFTTrainer for a causal model, which takes "
    "tokenized rows too, or Seq2SeqTrainingArguments with Seq2SeqTrainer"
)
_ELSEWHERE = dict.fromkeys(
    ("predict_with_generate", "eval_prompts", "eval_prompts_limit", "eval_metrics", "generation_max_new_tokens",
     "generation_max_length", "generation_num_beams", "generation_do_sample"),
    _ANSWERS,
)  # fmt: skip


Instance = TypeVar("Instance")


class AcceptsOldNames(type):
    """`cls(**names)` translates old names, refuses unknown ones, and raises all problems together."""

    # Annotated so that type checkers read the arguments from the dataclass.
    def __call__(cls: type[Instance], *args: Any, **given: Any) -> Instance:
        signature = _signature(cls)  # type: ignore[arg-type]
        given, clashes = _with_own_names(cls, given)
        positional = dict(zip(signature.positional, args, strict=False))
        everything = {**positional, **given, **_old_fields(cls, given)}
        arguments, problems = translate(everything)
        problems += clashes
        # An old name that the class declares itself is also passed on.
        names = signature.names
        arguments.update({name: given[name] for name in OLD_NAMES if name in given and name in names})
        # `replace(args, ...)` and `cls(**args.to_dict())` give all fields, so they do not show what was requested.
        copied = {field.name for field in dataclasses.fields(cls) if field.init} <= given.keys()  # type: ignore[arg-type]
        if copied:
            _settle_twins(arguments)
        problems += twin_problems(arguments)
        if not signature.takes_anything:
            problems += _unknown(arguments, names)
            arguments = {name: value for name, value in arguments.items() if name in names}
        keywords = {name: v for name, v in arguments.items() if name not in positional or name in given}
        try:
            instance: Instance = type.__call__(cls, *args, **keywords)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        refuse(problems)
        if not copied:
            instance.__dict__["_given"] = frozenset(arguments)
        instance.__dict__["_old"] = {n: v for n, v in given.items() if n in OLD_NAMES and n not in names}
        if not copied:
            _log_notes(cls, everything)
        return instance

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields with types and defaults: `help`, notebooks and editors would show the one of `__call__`."""
        types, made = hints(cls), {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.default_factory is not dataclasses.MISSING:
                made[field.name] = field.default_factory()
        return inspect.Signature(
            [
                p.replace(annotation=types.get(p.name, p.annotation), default=made.get(p.name, p.default))
                for p in _parameters(cls)
            ]
        )


@dataclass(frozen=True, slots=True)
class _Signature:
    """What `cls(...)` takes: all names in order, the positional ones, and whether it takes any keyword."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    takes_anything: bool


def _parameters(cls: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(cls.__init__).parameters.values())[1:]


@functools.cache
def _signature(cls: Any) -> _Signature:
    parameters = _parameters(cls)
    return _Signature(
        tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
        tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _with_own_names(cls: Any, given: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """`given` with today's names for those of `EARLIER_NAMES`, which one class alone had; and contradictions."""
    renamed, problems = dict(given), []
    for old, new in getattr(cls, "EARLIER_NAMES", {}).items():
        value = renamed.pop(old, None)
        if value is None:
            continue
        if renamed.setdefault(new, value) != value:
            problems.append(
                Problem(old, value, f"contradicts {new}={renamed[new]!r}, its new name; set only that")
            )
        warn_of_argument(f"the argument {old!r} is now {new!r}; using that")
    return renamed, problems


def _old_fields(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of old names that a script declares as fields of its subclass."""
    fields: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
    declared = {name: field for name, field in fields.items() if name in OLD_NAMES}
    return {name: given[name] if name in given else default_of(field) for name, field in declared.items()}


def _settle_twins(arguments: dict[str, Any]) -> None:
    """Let the newer of two names of one choice decide, in a copy in which they differ."""
    for old, new in TWINS.items():
        if old in arguments and new in arguments and arguments[old] != arguments[new]:
            warn_of_argument(
                f"a copy of the arguments holds two values for {old!r} and {new!r}; using {new!r}"
            )
            arguments[old] = arguments[new]


def _unknown(arguments: Mapping[str, Any], names: tuple[str, ...]) -> list[Problem]:
    known = [*names, *OLD_NAMES]
    return [
        Problem(
            name,
            value,
            _ELSEWHERE.get(name) or f"there is no such argument{did_you_mean(HABITS.get(name, name), known)}",
        )
        for name, value in arguments.items()
        if name not in names
    ]


def _log_notes(cls: Any, given: Mapping[str, Any]) -> None:
    """Log once the effect of arguments whose value does not do what their name says."""
    for name, rules in rules_of(cls).items():
        if rules.noted_at is not None and given.get(name) == rules.noted_at:
            warn_of_argument(f"the argument {name!r} is accepted, and {rules.mapped}")
