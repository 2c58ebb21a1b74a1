"""The pages of the API reference, made when the documentation is built: every public name, by subject.

A hook of mkdocs: signatures and docstrings are rendered by mkdocstrings; the arguments of configuration classes are
tables, made from the declarations of their fields, which no docstring of the source repeats.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import windlass
from windlass.config.sections.setting import default_of, rules_in

PAGES: dict[str, tuple[str, str]] = {
    "trainer": ("Trainer", "The training loop behind the interface that scripts of transformers know."),
    "arguments": ("Arguments", "What a `Trainer` is configured by, and the values that arguments take."),
    "fine-tuning": ("Fine-tuning", "Trainers for language models and preferences, and what prepares their text."),
    "loops": ("Accelerator", "Training loops that a script owns: the facade, its options, and its helpers."),
    "callbacks": ("Callbacks", "What watches a run: events, state, and the callbacks that are built in."),
    "data": ("Data", "Collators, and positions in data."),
    "optimizers": ("Optimizers and schedules", "What `optim` and `lr_scheduler_type` choose, for loops and scripts."),
    "checkpoints": ("Weights", "Weights in files. Checkpoints of runs are read and written by the trainers."),
    "errors": ("Errors, results and seeds", "What is raised and returned, and the seeds of all generators."),
    "scripts": ("For existing scripts", "Names that scripts of accelerate, transformers and TRL import."),
}  # fmt: skip
"""Page -> its title and first sentence."""

ROOMS = {
    "windlass.trainer": "trainer",
    "windlass.config.arguments": "arguments",
    "windlass.config.enums": "arguments",
    "windlass.config.callback_interface": "callbacks",
    "windlass.config": "loops",
    "windlass.finetuning": "fine-tuning",
    "windlass.text": "fine-tuning",
    "windlass.accelerator": "loops",
    "windlass.callbacks": "callbacks",
    "windlass.core.events": "callbacks",
    "windlass.core": "errors",
    "windlass.data": "data",
    "windlass.optim": "optimizers",
    "windlass.checkpoint": "checkpoints",
    "windlass.compat.plugin": "loops",
    "windlass.compat": "scripts",
    "windlass.launchers": "scripts",
    "windlass.utils": "scripts",
}
"""Beginning of a module's name -> the page of the public names that are defined there. The longest one counts."""


FIRST = "0.1.0"
SINCE: dict[str, str] = {}
"""Public name, or `Class.argument` -> the release that brought it, of those that `FIRST` does not have."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those that mkdocs builds."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each page of the reference, by its name."""
    names = sorted(name for name in windlass.__all__ if page_of(name))
    texts = {"index": "\n".join(_index(names))}
    for page, (title, sentence) in PAGES.items():
        entries = [_entry(name) for name in names if page_of(name) == page]
        texts[page] = "\n".join([f"# {title}", "", sentence, "", *itertools.chain(*entries)])
    return texts


def page_of(name: str) -> str | None:
    """Return the page that has a public name, or None for a module, which has the names of another library.

    Raises:
        LookupError: no page has the names of the module in which it is defined.
    """
    thing = getattr(windlass, name)
    if inspect.ismodule(thing):
        return None
    room = max((start for start in ROOMS if thing.__module__.startswith(start)), key=len, default=None)
    if room is None:
        raise LookupError(f"{name} is defined in {thing.__module__}, which has no page in ROOMS")
    return ROOMS[room]


def _index(names: list[str]) -> Iterator[str]:
    yield "# API reference"
    yield ""
    yield "Every name that `from windlass import ...` knows, with the first sentence of its description."
    yield ""
    yield "| name | what it is | since |"
    yield "|---|---|---|"
    for name in names:
        first = (inspect.getdoc(getattr(windlass, name)) or "").partition("\n\n")[0]
        sentence = " ".join(first.split()).replace("|", "&#124;")
        yield f"| [`{name}`]({page_of(name)}.md#{_anchor(name)}) | {sentence} | {since(name)} |"


def _entry(name: str) -> Iterator[str]:
    """Yield the lines of one public name."""
    thing = getattr(windlass, name)
    yield f"## `{name}` {{ #{_anchor(name)} }}"
    yield ""
    yield f"```python\nfrom windlass import {name}  # since {since(name)}\n```"
    yield ""
    fields = _documented_fields(thing)
    methods = [key for key, value in vars(thing).items() if _is_public(key, value)] if fields else None
    if fields:
        yield (inspect.getdoc(thing) or "").partition("\nAttributes:")[0]
        yield ""
        if (base := _documented_base(thing)) is not None:
            link = f"[`{base.__name__}`]({page_of(base.__name__)}.md#{_anchor(base.__name__)})"
            yield f"All arguments of {link}, and those below, which it has not or with another default."
            yield ""
            known = {field.name: default_of(field) for field in _documented_fields(base)}
            fields = [f for f in fields if f.name not in known or default_of(f) != known[f.name]]
        yield from _field_table(name, fields)
        yield ""
    if found := undescribed(thing):
        yield from _undescribed_table(name, found)
        yield ""
    if "<locals>" in getattr(thing, "__qualname__", ""):
        yield inspect.getdoc(thing) or ""
        yield ""
    elif methods is None or methods:
        yield f"::: {thing.__module__}.{thing.__qualname__}"
        if methods is not None:
            yield "    options:"
            yield f"      members: {methods}"
            yield "      show_docstring_description: true"
            yield "      show_docstring_attributes: false"
            yield "      show_signature: false"
        yield ""


def undescribed(thing: Any) -> list[inspect.Parameter]:
    """Return the arguments of a function or constructor that its docstring does not name."""
    if _documented_fields(thing) or (inspect.isclass(thing) and issubclass(thing, Enum)):
        return []
    try:
        given = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    text = inspect.getdoc(thing) or ""
    named = (one for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
    return [one for one in named if not re.search(rf"\b{one.name}\b", text)]


def _undescribed_table(name: str, found: list[inspect.Parameter]) -> Iterator[str]:
    """Yield the table of arguments whose meaning is the same wherever they are."""
    words = _words()
    yield "| argument | type | default | meaning | since |"
    yield "|---|---|---|---|---|"
    for one in found:
        kind = (
            ""
            if one.annotation is one.empty
            else f"`{inspect.formatannotation(one.annotation)}`".replace("'", "")
        )
        default = "required" if one.default is one.empty else f"`{one.default!r}`"
        cells = [f"`{one.name}`", kind, default, words[one.name], since(f"{name}.{one.name}")]
        yield f"| {' | '.join(cells)} |"


def _words() -> dict[str, str]:
    """The meanings of arguments. Loaded by path: mkdocs runs this file as a hook, and not as a part of a package."""
    spec = importlib.util.spec_from_file_location(
        "argument_words", Path(__file__).with_name("argument_words.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words: dict[str, str] = module.WORDS
    return words


def _documented_fields(thing: Any) -> list[dataclasses.Field[Any]]:
    if not (inspect.isclass(thing) and dataclasses.is_dataclass(thing)):
        return []
    return [field for field in dataclasses.fields(thing) if field.metadata.get("help")]


def _documented_base(thing: type) -> type | None:
    """Return the nearest base class that has a public name and a table of its own."""
    public = (base for base in thing.__mro__[1:] if getattr(windlass, base.__name__, None) is base)
    return next(filter(_documented_fields, public), None)


def since(name: str) -> str:
    """Return the release that brought a public name, or an argument: `Class.argument`."""
    return SINCE.get(name, FIRST)


def _field_table(name: str, fields: list[dataclasses.Field[Any]]) -> Iterator[str]:
    yield "| argument | type | default | meaning | since |"
    yield "|---|---|---|---|---|"
    for field in fields:
        default, rules = default_of(field), rules_in(field)
        given = "required" if default is dataclasses.MISSING else f"`{default!r}`"
        reason = rules.refused or rules.mapped
        meaning = field.metadata["help"] + (f" It {reason}." if reason else "")
        kind = field.type.__name__ if isinstance(field.type, type) else field.type
        release = since(f"{name}.{field.name}")
        yield f"| `{field.name}` | `{kind}` | {given} | {meaning.replace('|', '&#124;')} | {release} |"


def _is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and (
        inspect.isfunction(value) or isinstance(value, property | classmethod)
    )


def _anchor(name: str) -> str:
    return name.lower()
