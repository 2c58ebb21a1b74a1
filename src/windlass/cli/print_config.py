"""`windlass train --print-config`: print the complete recipe as YAML that can be run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from windlass.cli.schema import Recipe
from windlass.cli.training import training_arguments
from windlass.config.documents import one_line
from windlass.core.redact import is_secret_name, redact_text

MARK = "# * "
HEAD = f"""\
# The complete recipe, defaults included. Lines marked `{MARK.strip()}` differ from the default.
# Save it and run it: windlass train FILE
"""


def render_config(recipe: Recipe) -> str:
    """Return YAML of every key of `recipe`, from which an equal recipe is read."""
    lines = [HEAD]
    for item in fields(recipe):
        if item.name != "training":
            default = item.default_factory() if callable(item.default_factory) else item.default
            doc = item.metadata.get("help", "")
            lines += _entry(item.name, getattr(recipe, item.name), default, doc, indent="")
    lines.append("\ntraining:")
    lines += _training(recipe)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any, default: Any, doc: str, indent: str) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):
        yield f"{'' if indent else chr(10)}{indent}{name}:"
        base = default if default is not None else type(value)()
        for item in fields(value):
            inner = getattr(value, item.name), getattr(base, item.name)
            yield from _entry(item.name, *inner, item.metadata.get("help", ""), indent + "  ")
    else:
        comment = doc if value == default else f"{doc} (default: {one_line(_plain(default))})"
        yield _line(f"{indent}{name}: {one_line(_plain(value))}", comment, changed=value != default)


def _training(recipe: Recipe) -> Iterator[str]:
    from windlass.config.arguments import describe

    for name, value, is_default in describe(training_arguments(recipe.training, recipe.task)):
        if not is_secret_name(name):
            yield _line(f"  {name}: {one_line(_plain(value))}", "", changed=not is_default)


def _line(text: str, comment: str, *, changed: bool) -> str:
    if changed:
        return f"{text}  {MARK}{comment}".rstrip()
    return f"{text}  # {comment}" if comment else text


def _plain(value: Any) -> Any:
    """Return a value for YAML: enums by value, tuples as lists."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return redact_text(str(getattr(value, "value", value)))
    return value
