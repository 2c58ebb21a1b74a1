"""Command-line flags of dataclass fields, by their types."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from windlass.config.kinds import flag
from windlass.config.sections.setting import default_of, flag_options
from windlass.config.values import members


def string_to_bool(text: str | bool) -> bool:
    """Read yes/no, true/false, on/off, t/f, y/n, 1/0 in any case. Raises ArgumentTypeError for anything else."""
    try:
        return flag(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value; use true or false") from None


def make_choice_type_function(choices: Sequence[Any]) -> Callable[[str], Any]:
    """Return a function from the text of a choice to the choice; it returns any other text unchanged."""
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def _bool_or_text(text: str) -> bool | str:
    """Read a field of bool or text: only `true` and `false` are bools, so that a path named `1` stays a path."""
    return text.lower() == "true" if text.lower() in ("true", "false") else text


class _OneOrMany(argparse.Action):
    """One word stays a word; several become a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def add_field(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add the flags of one dataclass field: `--name`, `--na-me`, aliases, and `--no_name` for a bool that is True."""
    metadata = flag_options(field)
    aliases = metadata.pop("aliases", [])
    aliases = [aliases] if isinstance(aliases, str) else aliases
    names = list(dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"]))
    kwargs = {**metadata, **_conversion(field, hint), **_default(field, hint)}
    group.add_argument(*names, *aliases, **kwargs)
    if default_of(field) is True and _is_bool(hint):
        negated = list(dict.fromkeys([f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]))
        # After the flag itself: of two actions with one destination the first sets the default.
        extra = {key: value for key, value in metadata.items() if key == "help"}
        group.add_argument(*negated, action="store_false", dest=field.name, default=False, **extra)


def _is_bool(hint: Any) -> bool:
    return set(members(hint)) - {type(None)} == {bool}


def _default(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if (default := default_of(field)) is not dataclasses.MISSING:
        return {"default": default}
    return {"default": False} if hint is bool else {"required": True}


def _conversion(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The `type`, `nargs`, `choices` of a flag, from the type of its field. Raises ValueError for a union of types that
    one flag cannot distinguish.
    """
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    if _is_bool(hint):
        return _bool_flag(field, hint)
    words = [kind for kind in kinds if kind is not str]
    if (
        len(words) == 1
        and (choices := _choices(words[0])) is not None
        and get_origin(words[0]) is not Literal
    ):
        return {"choices": choices, "type": make_choice_type_function(choices)}
    if len(kinds) == 1 and (choices := _choices(kinds[0])) is not None:
        return {"choices": choices, "type": make_choice_type_function(choices)}
    lists = [kind for kind in kinds if get_origin(kind) is list or kind is list]
    if lists:
        if str in kinds:
            return {"nargs": "+", "type": str, "action": _OneOrMany}
        return {"nargs": "+", "type": (get_args(lists[0]) or (str,))[0]}
    if bool in kinds and str in kinds:
        return {"type": _bool_or_text, "nargs": "?", "const": True}
    if str in kinds or Any in kinds:
        return {"type": str}
    if len(kinds) != 1:
        raise ValueError(
            f"field {field.name!r}: a flag has one type, Optional[X] or a union with str, and not {hint}"
        )
    return {"type": kinds[0]}


def _bool_flag(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if hint is bool or default_of(field) not in (None, dataclasses.MISSING):
        return {"type": string_to_bool, "nargs": "?", "const": True}
    return {"type": string_to_bool}


def _choices(kind: Any) -> Sequence[Any] | None:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return None
