"""`windlass schema`: the JSON schema of recipes, by which editors complete and check their keys.

The file beside the built-in recipes is what this prints; a test compares the two.
"""

from __future__ import annotations

import json
import math
from types import NoneType
from typing import Any

from windlass.cli.command_line import CommandParser
from windlass.config.documents import Keys
from windlass.core.output import STDOUT
from windlass.recipes.argument_table import Argument, all_arguments
from windlass.recipes.built_in_recipes import FOLDER
from windlass.recipes.schema import NESTED, SHORTHANDS

FILE = FOLDER.parent / "recipe.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={FILE.as_uri()}\n"
"""The first line of a recipe for editors: many read schemas that a file names so."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Readers of YAML 1.1 take 2e-4 for text.
_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"}]}
_KINDS: dict[type, dict[str, Any]] = {
    int: _NUMBER,
    float: _NUMBER,
    bool: {"type": "boolean"},
    str: {"type": "string"},
    dict: {"type": "object"},
    list: {"type": "array"},
    NoneType: {"type": "null"},
}


def schema_command(words: list[str]) -> int:
    build_parser().parse_args(words)
    # Not `say`, which would redact the description of the key `hub_token`.
    STDOUT.write(json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n")
    return 0


def build_parser() -> CommandParser:
    return CommandParser(
        prog="windlass schema",
        description="Print the JSON schema of recipes, for editors. Recipes that `windlass init` and --print-config "
        "write name the copy that is installed.",
        example="windlass schema > recipe.schema.json",
    )


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe. What only a run can judge (paths, options of other libraries) is open."""
    whole = _section("A recipe of windlass train.")
    for argument in all_arguments():
        is_section = (argument.owner, argument.keys[-1]) in NESTED
        _put(whole, argument.keys, _section(argument.doc) if is_section else _leaf(argument))
        for name in argument.earlier_names:
            earlier = {"description": f"The earlier name of {argument.keys[-1]}.", "deprecated": True}
            _put(whole, (*argument.keys[:-1], name), earlier)
    # `model: gpt2` is valid too.
    for name, key in SHORTHANDS.items():
        short = {"type": ["string", "null"], "description": f"Short for {name}.{key}."}
        whole["properties"][name] = {"anyOf": [whole["properties"][name], short]}
    return {"$schema": _DIALECT, "title": "Windlass recipe", **whole}


def _section(description: str) -> dict[str, Any]:
    """Return the schema of a mapping with known keys, which may be absent: null."""
    return {
        "type": ["object", "null"],
        "description": description,
        "properties": {},
        "additionalProperties": False,
    }


def _put(whole: dict[str, Any], keys: Keys, node: dict[str, Any]) -> None:
    """Add the schema of one key; that of a section comes before those of the keys in it."""
    properties = whole["properties"]
    for name in keys[:-1]:
        section = properties.setdefault(name, _section("Any argument of the task's trainer."))
        properties = section["properties"]
    properties[keys[-1]] = node


def _leaf(argument: Argument) -> dict[str, Any]:
    """Return the schema of a key that has a value."""
    allowed = [_KINDS[kind] for kind in argument.kinds() if kind in _KINDS]
    if words := [str(word) for word in argument.values()]:
        # Text is open if words are not all that a key may have: names of the libraries, patterns.
        is_open = (
            str in argument.kinds()
            and not argument.field.metadata.get("choices")
            and argument.keys != ("task",)
        )
        allowed = [{"enum": words}, *(kind for kind in allowed if is_open or kind != _KINDS[str])]
    node: dict[str, Any] = {"description": argument.doc}
    if allowed:
        node |= allowed[0] if len(allowed) == 1 else {"anyOf": allowed}
    default = getattr(argument.default, "value", argument.default)
    is_plain = default is None or isinstance(default, bool | int | str | list | dict)
    is_plain = is_plain or (isinstance(default, float) and math.isfinite(default))
    return {**node, "default": default} if is_plain else node
