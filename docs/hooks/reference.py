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
"""Public name, `Class.argument` of a constructor, `Class.method` or `Class.method.argument` -> the release that brought
it, of those that `FIRST` does not have."""

OF_EVENTS = ("args", "state", "control")
"""Arguments that each event of a callback receives, which `TrainerCallback` describes once."""


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
    yield "Every name that `from windlass import ...` knows, with the first sentence of its description. Methods and"
    yield "arguments are as old as their class, if no release of their own is given."
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
    elif inspect.isclass(thing):
        yield from _class_entry(name, thing, has_table=bool(fields))
    else:
        yield f"::: {thing.__module__}.{thing.__qualname__}"
        yield ""


def _class_entry(name: str, owner: type, *, has_table: bool) -> Iterator[str]:
    """Yield what mkdocstrings makes of a class: its methods alone, if it has a table of arguments."""
    described = _described(owner)
    shown = [key for key in described if _is_seen(key, methods(owner)[key])]
    if (base := next((one for one in _public_bases(owner) if methods(one)), None)) is not None:
        link = f"[`{base.__name__}`]({page_of(base.__name__)}.md#{_anchor(base.__name__)})"
        yield f"It has the methods of {link} too. What is not described of a method here is described there."
        yield ""
    for key, release in SINCE.items():
        owned, _, rest = key.partition(".")
        if owned == name and rest.partition(".")[0] in methods(owner):
            yield f"- `{rest}`: since {release}"
            yield ""
    for key in sorted(described.keys() - shown):
        given = ", ".join(_arguments(methods(owner)[key]))
        yield f"- `{key}{f'({given})' if given else ''}`: {' '.join(described[key].split())}"
    yield ""
    if shown or not has_table:
        yield f"::: {owner.__module__}.{owner.__qualname__}"
        yield "    options:"
        yield f"      inherited_members: {[key for key in shown if key not in vars(owner)]}"
        if has_table:
            yield f"      members: {shown}"
            yield "      show_docstring_description: true"
            yield "      show_docstring_attributes: false"
            yield "      show_signature: false"
        yield ""


def methods(owner: type) -> dict[str, Any]:
    """Return the public methods and properties of a class: its own, and those of bases that have no page."""
    public, found = _public_bases(owner), dict[str, Any]()
    for base in owner.__mro__:
        if base is owner or not (_is_foreign(base) or any(issubclass(one, base) for one in public)):
            own = {key: value for key, value in vars(base).items() if _is_public(key, value)}
            found = {**own, **found}
    return found


def unexplained(owner: type) -> list[str]:
    """Return the methods of a class without a description, and `method(argument)` for arguments without a meaning.

    What a reader finds counts: the docstring that the page has of a method, those of the methods of public bases that
    it overrides, and what `TrainerCallback` describes for all events.
    """
    found, owners = [], [owner, *_public_bases(owner)]
    for key, value in methods(owner).items():
        text = "\n".join(_described(one).get(key, "") for one in owners)
        known = OF_EVENTS if key.startswith("on_") and issubclass(owner, windlass.TrainerCallback) else ()
        lost = [one for one in _arguments(value) if one not in known and not _names(text, one)]
        found += [f"{key}({one})" for one in lost] if text.strip() else [key]
    return found


def _names(text: str, argument: str) -> bool:
    """Return True if a docstring names an argument as code, in a list of arguments, or as a part of a file's name."""
    return re.search(rf"`[^`]*\b{argument}\b[^`]*`|\b{argument}\b[^\n`]*:", text) is not None


def _described(owner: type) -> dict[str, str]:
    """Return the docstrings of the methods of a class; if one has none, that of the base without a page which has."""
    public, found = _public_bases(owner), dict[str, str]()
    for key in methods(owner):
        for base in owner.__mro__:
            if base not in public and _is_public(key, value := vars(base).get(key)) and value.__doc__:
                found.setdefault(key, inspect.cleandoc(value.__doc__))
    return found


def _arguments(method: Any) -> list[str]:
    """Return the names of the arguments of a method, without `self`, `*args` and `**kwargs`."""
    if isinstance(method, property):
        return []
    given = list(inspect.signature(_function_of(method)).parameters.values())
    bound = given if isinstance(method, staticmethod) else given[1:]
    return [one.name for one in bound if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def _is_seen(key: str, method: Any) -> bool:
    """Return True if mkdocstrings finds a docstring: it reads the source, and a function may have made the method, or
    defined it under another name.
    """
    return bool(method.__doc__) and _function_of(method).__qualname__.endswith(f".{key}")


def _function_of(method: Any) -> Any:
    return method.fget if isinstance(method, property) else getattr(method, "__func__", method)


def _public_bases(owner: type) -> list[type]:
    """Return the base classes that have a public name, the nearest first."""
    return [base for base in owner.__mro__[1:] if getattr(windlass, base.__name__, None) is base]


def _is_foreign(owner: type) -> bool:
    return not owner.__module__.startswith("windlass.")


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
    return [one for one in named if not _names(text, one.name)]


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
    return next(filter(_documented_fields, _public_bases(thing)), None)


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
        inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
    )


def _anchor(name: str) -> str:
    return name.lower()
