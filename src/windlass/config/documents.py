"""Settings as text: YAML and JSON files, and `a.b=1` on a command line. Errors name the file, the line and the key."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import at_home
from windlass.core.whole_file import parse_json, read_text

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping that was read from text, with the line of each key."""

    values: dict[str, Any]  # the mapping, as plain Python values
    source: str = "<settings>"  # the name of the file, or a placeholder
    # Line number (from 1) of each key, by its path of keys
    lines: Mapping[Keys, int] = field(default_factory=dict)

    def place(self, *keys: str) -> str:
        """Return `recipe.yaml:12`, the line of a key."""
        line = self.lines.get(keys)
        return f"{self.source}:{line}" if line else self.source

    def where(self, *keys: str) -> str:
        """Return `recipe.yaml:12: a.b`, for an error about the value at `keys`."""
        return f"{self.place(*keys)}: {'.'.join(keys)}"


_INT = "tag:yaml.org,2002:int"


def _without(kind: type[yaml.SafeLoader], *names: str) -> dict[str, list[tuple[str, Any]]]:
    """The resolvers of a loader's plain scalars, but for those of the tags of these names."""
    tags = [f"tag:yaml.org,2002:{name}" for name in names]
    return {
        first: [(tag, regex) for tag, regex in resolvers if tag not in tags]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }


class LaunchLoader(yaml.SafeLoader):
    """YAML 1.1, in which `no` is False, but for whole numbers, which are decimal, and dates: `1:00:00` is text and not
    3600, and `010` is text and not 8.
    """

    yaml_implicit_resolvers = _without(yaml.SafeLoader, "int", "timestamp")


LaunchLoader.add_implicit_resolver(_INT, re.compile(r"^-?(?:0|[1-9][0-9]*)$"), list("-0123456789"))


class _Loader(LaunchLoader):
    """YAML 1.2's plain scalars: `no`, `on` and `off` are words and `5e-5` is a number, unlike in YAML 1.1."""

    yaml_implicit_resolvers = _without(LaunchLoader, "bool", "float", "int")

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 16 if "x" in text else 10)


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(?:[0-9]+|0x[0-9a-fA-F]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class ForeignYaml(yaml.SafeLoader):
    """YAML 1.1, as other programs read their configurations: `no` is False. `5e-5` is a number, as it is to them."""

    yaml_implicit_resolvers = _without(yaml.SafeLoader, "float")


for _loader in (_Loader, ForeignYaml):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
            r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )
    # Whole numbers are tried first, because the pattern of floats matches them too.
    for _resolvers in _loader.yaml_implicit_resolvers.values():
        _resolvers.sort(key=lambda pair: pair[0] != _INT)


def load(path: str | Path, loader: type[yaml.SafeLoader] = _Loader) -> Document:
    """Read a mapping from a `.json` file, or from YAML in any other. Raises ConfigError if the file is missing, is not
    readable, repeats a key or holds no mapping; with file and line.

    Args:
        loader: decides which words of YAML are truth values and numbers.
    """
    source = str(path)
    try:
        text = read_text(at_home(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(Problem("file", source, f"cannot be read: {reason}")) from None
    return loads(text, source, loader, json_text=Path(path).suffix.lower() == ".json")


def loads(
    text: str,
    source: str = "<settings>",
    loader: type[yaml.SafeLoader] = _Loader,
    *,
    json_text: bool = False,
) -> Document:
    """Read a mapping from YAML, or from JSON with `json_text`. Raises the errors of `load`."""
    values, lines = _read_json(text, source) if json_text else _read_yaml(text, source, loader)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(Problem(source, type(values).__name__, "must hold a mapping of names to values"))
    return Document(values, source, lines)


def _read_yaml(text: str, source: str, loader: type[yaml.SafeLoader]) -> tuple[Any, dict[Keys, int]]:
    lines: dict[Keys, int] = {}
    try:
        values, node = load_yaml(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(Problem(place, error.problem or "", "is not valid YAML here")) from None
    except yaml.YAMLError as error:
        raise ConfigError(Problem(source, str(error), "is not valid YAML")) from None
    if node is not None:
        _note_lines(node, (), lines, source)
    return values, lines


def _note_lines(node: yaml.Node, path: Keys, lines: dict[Keys, int], source: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines and key.value != "<<":
            fix = f"is given twice; it was given before on line {lines[here]}"
            raise ConfigError(Problem(f"{source}:{line}", ".".join(here), fix))
        lines[here] = line
        _note_lines(value, here, lines, source)


def _read_json(text: str, source: str) -> tuple[Any, dict[Keys, int]]:
    repeated: list[str] = []

    def noting_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        values = parse_json(text, object_pairs_hook=noting_repeated)
    except json.JSONDecodeError as error:
        raise ConfigError(Problem(f"{source}:{error.lineno}", error.msg, "is not valid JSON here")) from None
    # Python's parser does not tell lines, and YAML's does. It cannot read JSON with tabs or an escaped slash.
    lines: dict[Keys, int] = {}
    with contextlib.suppress(yaml.YAMLError):
        node = load_yaml(text, _Loader)[1]
        if node is not None:
            _note_lines(node, (), lines, source)
    if repeated:
        raise ConfigError(Problem(source, repeated[0], "is given twice"))
    return values, lines


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: words that YAML 1.2 would read as a number or bool are quoted."""

    yaml_implicit_resolvers = {
        first: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
            *_Loader.yaml_implicit_resolvers.get(first, []),
        ]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent text with line breaks in double quotes, which escape them."""
    broken = len(text.splitlines()) > 1 or text != text.rstrip("\r\n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if broken else None)


_Dumper.add_representer(str, _text)


def one_line(value: Any) -> str:
    """Return `value` (of plain Python types) as one line of YAML that `loads` reads back unchanged."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False)
    return str(text).removesuffix("...\n").strip()


def parse_override(text: str) -> tuple[Keys, Any]:
    """`"a.b=1"` as (("a", "b"), 1); the value is read as YAML, such as `1e-5`, `true`, `[1, 2]`. Raises ConfigError if
    there is no `=`, no name before it, or the value is not valid YAML.
    """
    name, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in name.strip().removeprefix("--").split("."))
    if not equals or not all(keys):
        raise ConfigError(
            Problem("override", text, "must be name=value, with dots for a name inside another")
        )
    try:
        return keys, load_yaml(value, _Loader)[0]
    except _Unspaced as error:
        raise ConfigError(Problem(".".join(keys), value, str(error.problem))) from None
    except yaml.YAMLError:
        raise ConfigError(Problem(".".join(keys), value, "is not a valid value; quote it")) from None


_MAX_NODES = 1 << 17


class _Unspaced(yaml.MarkedYAMLError):
    """Of `{r:8}` YAML makes the name "r:8" without a value, which would be passed over."""


def load_yaml(
    text: str, loader_class: type[yaml.SafeLoader] = yaml.SafeLoader
) -> tuple[Any, yaml.Node | None]:
    """Return the plain value in a YAML text, and its node. Raises yaml.YAMLError if it is not valid, nested too deeply,
    or its aliases would expand to too much.
    """
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_extent(node)
        return loader.construct_document(node), node
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # An invalid date, a number with too many digits, or a text that is not of the type that its tag names.
        raise yaml.YAMLError(
            f"it has a value that is not of its type ({type(error).__name__}: {error})"
        ) from None
    finally:
        loader.dispose()


def _check_extent(node: yaml.Node) -> None:
    """Refuse a node that has too many nodes with its aliases expanded; one that contains itself has no end."""
    visited, waiting = 0, [node]
    while waiting:
        visited += 1
        if visited > _MAX_NODES:
            raise yaml.YAMLError("its aliases refer to each other too often")
        here = waiting.pop()
        if isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)
        elif isinstance(here, yaml.MappingNode):
            waiting.extend(part for pair in here.value for part in pair)
            for key, value in here.value if here.flow_style else ():
                _check_spaced(key, value)


def _check_spaced(key: yaml.Node, value: yaml.Node) -> None:
    """Refuse a name that was to be a name and its value."""
    plain = isinstance(key, yaml.ScalarNode) and key.style is None and ":" in key.value
    if plain and isinstance(value, yaml.ScalarNode) and not (value.value or value.style):
        problem = f"{key.value!r} has no value: write a space after the colon"
        raise _Unspaced(problem=problem, problem_mark=key.start_mark)
