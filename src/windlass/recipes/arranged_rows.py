"""Rows of data whose columns, messages or prompts have names and forms of their own (`data.rename`, `data.messages`,
`data.prompt_format`).
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from windlass.core.errors import DataError
from windlass.recipes.schema import DataSpec, MessagesSpec


def formats_of(data: DataSpec) -> list[str]:
    """Return the formats of prompts, of which the first that fits is used."""
    text = data.prompt_format
    return [text] if isinstance(text, str) else text or []


def columns_of(text: str) -> list[str]:
    """Return the columns that a format of prompts names. Raises ValueError for braces without a plain name."""
    found = []
    for _, name, spec, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        if not name or spec or conversion or not name.isidentifier():
            raise ValueError(f"{{{name}}} does not name a column")
        found.append(name)
    return found


def columns_read(data: DataSpec) -> set[str]:
    """Return the columns that these keys of a recipe name."""
    named = {column for text in formats_of(data) for column in columns_of(text)} | set(data.rename or ())
    return named | ({data.messages.column} if data.messages else set())


def arranged(where: str, values: Mapping[str, Any], data: DataSpec) -> dict[str, Any]:
    """Return a row with the columns that fine-tuning knows. Raises DataError if no format of prompts fits, two columns
    are renamed to one, or the messages are not a list; names the row.
    """
    row = _renamed(where, values, data.rename or {})
    if data.messages is not None:
        row["messages"] = _messages(where, row.pop(data.messages.column, None), data.messages)
    if formats := formats_of(data):
        row["prompt"] = _prompt(where, row, formats)
    return row


def _renamed(where: str, values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A column that is renamed takes the place of one that had the new name: the recipe asks for it by name."""
    taken = Counter(names[name] for name in values if name in names)
    for name, count in taken.items():
        if count > 1:
            raise DataError(f"{where}: data.rename calls {count} of its columns {name!r}")
    return {
        names.get(name, name): value for name, value in values.items() if name in names or name not in taken
    }


def _messages(where: str, messages: Any, spec: MessagesSpec) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(
            f"{where}: column {spec.column!r} must hold a list of messages (data.messages.column)"
        )
    return [
        {
            **{name: value for name, value in message.items() if name not in (spec.role, spec.content)},
            "role": _role(message.get(spec.role), spec.roles or {}),
            "content": message.get(spec.content),
        }
        for message in messages
    ]


def _role(found: Any, names: Mapping[str, str]) -> Any:
    return names.get(found, found) if isinstance(found, str) else found  # the form of rows names a wrong one


def _prompt(where: str, row: Mapping[str, Any], formats: list[str]) -> str:
    for text in formats:
        columns = columns_of(text)
        if all(isinstance(row.get(name), str) and row[name] for name in columns):
            return text.format_map({name: row[name] for name in columns})
    needed = " or ".join(", ".join(columns_of(text)) for text in formats)
    have = ", ".join(name for name, value in row.items() if value)
    raise DataError(
        f"{where}: no text in the columns of data.prompt_format ({needed}); this record has: {have}"
    )
