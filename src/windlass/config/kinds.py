"""The one place where values are converted: those of a file, a flag, a variable, a recipe or a script.

A reader converts a value to its canonical form. It raises `ValueError` with the end of a sentence ("must be ...") if it
cannot, returns None if the value leaves the setting unset, and accepts its own results.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.whole_file import parse_json, read_text

Reader = Callable[[Any], Any]
TRUE = ("true", "yes", "y", "t", "on", "1")
FALSE = ("false", "no", "n", "f", "off", "0")


def flag(raw: Any) -> bool:
    word = str(raw).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("must be true or false")


def _numeric(kind: type[int] | type[float], fix: str) -> Reader:
    def read(raw: Any) -> Any:
        if not isinstance(raw, bool) and isinstance(raw, (int, kind, str)):
            with contextlib.suppress(ValueError):
                # Launchers of accelerate up to 1.12 write FSDP_MIN_NUM_PARAMS=100000000.0.
                return kind(raw.removesuffix(".0") if kind is int and isinstance(raw, str) else raw)
        raise ValueError(fix)

    return read


whole = _numeric(int, "must be a whole number")
number = _numeric(float, "must be a number")


def _bounded(read: Reader, holds: Callable[[Any], bool], fix: str) -> Reader:
    def read_bounded(raw: Any) -> Any:
        value = read(raw)
        if not holds(value):
            raise ValueError(fix)
        return value

    return read_bounded


positive = _bounded(whole, lambda n: n >= 1, "must be at least 1")
natural = _bounded(whole, lambda n: n >= 0, "must not be negative")
port = _bounded(whole, lambda n: 0 <= n <= 65535, "must be a port between 0 (choose a free one) and 65535")
positive_seconds = _bounded(number, lambda n: 0 < n < float("inf"), "must be a number of seconds above 0")


def text(raw: Any) -> str:
    if isinstance(raw, str | int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError("must be text")


def anything(raw: Any) -> Any:
    return raw


def words(raw: Any) -> tuple[str, ...]:
    """Names: a list of them, or text with commas between them."""
    if isinstance(raw, str):
        return tuple(word.strip() for word in raw.split(",") if word.strip())
    if isinstance(raw, list | tuple | set | frozenset) and all(isinstance(item, str) for item in raw):
        return tuple(raw)
    raise ValueError("must be a list of names, or names with commas between them")


def names_or_pattern(raw: Any) -> str | tuple[str, ...]:
    """A regular expression as text, or a list of names."""
    if not isinstance(raw, str):
        return words(raw)
    try:
        re.compile(raw)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error}): give one, or a list of names") from None
    return raw


def options(raw: Any) -> dict[str, Any]:
    """A mapping, text such as `timeout=60,join_timeout=30`, or a list of such pairs."""
    if isinstance(raw, Mapping):
        return {str(key): value for key, value in raw.items()}
    # A pair in a list may contain commas, as `CUDA_VISIBLE_DEVICES=0,1`.
    pairs = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(pairs, list) or not all(isinstance(pair, str) for pair in pairs):
        raise ValueError("must be a mapping, or text such as name=value,name=value")
    found = {}
    for pair in filter(None, (part.strip() for part in pairs)):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"must be name=value, name=value, and {pair!r} is not such a pair")
        found[key.strip()] = value.strip()
    return found


def variables(raw: Any) -> dict[str, str]:
    """As `options`, of variables of the environment: what a file reads as another value than a text or a whole number
    would not be what is written there.
    """
    found = options(raw)
    for name, value in found.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise ValueError(
                f"must be names with values, and an environment cannot hold {name!r} or its value"
            )
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(
                f"must have text as its values, and {name} has {value!r}: put what is meant in quotes"
            )
    return {name: str(value) for name, value in found.items()}


def plain_options(raw: Any) -> dict[str, Any]:
    """As `options`, and text is read as JSON if it is: numbers and truth values keep their types."""
    return {key: _plain(value) if isinstance(value, str) else value for key, value in options(raw).items()}


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _spellings(raw: Any) -> tuple[Any, ...]:
    """The names by which `raw` may select a choice: name and value of an enum, because torch's enums have the word as
    their name and a number as their value, or the name of a function or of a partial of one.
    """
    if isinstance(raw, Enum):
        return raw.name, raw.value
    function = raw.func if isinstance(raw, functools.partial) else raw
    return (function.__name__,) if callable(function) and hasattr(function, "__name__") else (raw,)


def numbered(words: Iterable[str]) -> dict[str, str]:
    """Each word by its number from 1, for `choice(also=)`."""
    return {str(number): word for number, word in enumerate(words, start=1)}


class OneOf:
    """A reader of one of the words `allowed`, in any case.

    Args:
        also: other spellings (in lower case), and the canonical value of each.
        refused: known words that are not built, with the reason as the end of a sentence.
    """

    def __init__(
        self, *allowed: str, also: Mapping[str, Any] | None = None, refused: Mapping[str, str] | None = None
    ) -> None:
        self.allowed, self.refused = allowed, refused or {}
        self._table = {word.lower(): word for word in allowed} | dict(also or {})

    def __call__(self, raw: Any) -> Any:
        for word in (str(spelling).strip().lower() for spelling in _spellings(raw)):
            if word in self._table:
                return self._table[word]
            if word in self.refused:
                raise ValueError(self.refused[word])
        raise ValueError(f"must be one of {', '.join(self.allowed)}")


class Either:
    """A reader that tries `readers` in order and returns the first result; `says` is its error."""

    def __init__(self, *readers: Reader, says: str) -> None:
        self.readers, self.says = readers, says

    def __call__(self, raw: Any) -> Any:
        for reader in self.readers:
            with contextlib.suppress(ValueError):
                return reader(raw)
        raise ValueError(self.says)


_SHAPES: dict[Reader, str] = {
    flag: "{true,false}",
    **dict.fromkeys((whole, positive, natural, port), "N"),
    number: "X",
    positive_seconds: "SECONDS",
    text: "TEXT",
    words: "NAME,NAME",
    names_or_pattern: "NAME,NAME",
    options: "NAME=VALUE",
    variables: "NAME=VALUE",
    plain_options: "NAME=VALUE",
}


def shape(read: Reader) -> str:
    """Return the form of a value, as a help shows it: `N`, `{static,c10d}`, `NAME=VALUE`."""
    if isinstance(read, OneOf):
        return f"{{{','.join(read.allowed)}}}"
    if isinstance(read, Either):
        return "|".join(shape(reader) for reader in read.readers)
    return _SHAPES.get(read, "VALUE")


# --- by the type of a field -----------------------------------------------------------------------------------------


def as_declared(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A value of a script in the form that its field declares: words become members of an enum, NumPy's numbers
    Python's, and 8.0 is 8 if the type is int. Others are unchanged. `kinds`: the alternatives of the field's type.
    """
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        words = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), ())
        return next((member for member in words if member.value == str(value)), value)
    if bool in kinds and type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, Integral) and (int in kinds or float in kinds):
        return int(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in kinds and isinstance(value, Real) and not isinstance(value, int):
        return float(value)
    return value


def from_text(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A text as the number or bool that its field declares, if it is one; another value is unchanged."""
    if not isinstance(value, str) or str in kinds or Any in kinds:
        return value
    for kind, read in ((bool, flag), (int, int), (float, float)):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return read(value)
    return value


def typed_words(value: Any) -> Any:
    """Words that are truth values or numbers become them, also inside mappings."""
    if isinstance(value, dict):
        return {key: typed_words(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


# --- the one form of a field's values: each returns what it does not convert as it is -------------------------------


def as_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_list(value: Any) -> Any:
    """One word as a list of it."""
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def as_stride(value: Any) -> Any:
    """A number of updates, which are whole; below 1 it is a share of them."""
    return int(value) if isinstance(value, float) and value > 1 and value.is_integer() else value


def document(value: Any) -> Any:
    """The dict that a value is, or that JSON text or the path of a JSON file holds. Raises ValueError, with the reason,
    if there is none; None and empty text are unchanged.
    """
    value = as_path(value)
    if isinstance(value, str):
        return value and read_document(value)
    if value is None or isinstance(value, dict):
        return value
    raise ValueError(f"must be a dict, JSON, or the path of a JSON file, and is {type(value).__name__}")


def read_document(text: str) -> dict[str, Any]:
    """Return the dict in JSON text, or in the JSON file whose path is `text`. Raises ValueError, with the reason, if it
    is neither.
    """
    source = text if text.lstrip().startswith("{") else None
    try:
        value = parse_json(read_text(Path(os.path.expanduser(text))) if source is None else source)
    except OSError as error:
        raise ValueError(f"is neither JSON nor a readable file ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds JSON of type {type(value).__name__}, not an object")
    # A command line cannot quote types inside JSON easily, so words that look like numbers become numbers.
    return {key: typed_words(item) for key, item in value.items()} if source is not None else value


def mapping(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A copy of an argument that may be given as JSON; `check` has read its text by now."""
    assert not value or isinstance(value, dict), "`check` refuses text that cannot be read"
    return dict(value or {})


_SECONDS = {
    word: length
    for words, length in (
        ("s sec secs", 1),
        ("m min mins", 60),
        ("h hour hours", 3600),
        ("d day days", 86400),
    )
    for word in words.split()
}
_BYTES = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _BYTES |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*")


def seconds(value: str | float) -> float:
    """Return the seconds of a time such as `"5min"`, `"90s"` or `"1.5h"`; a number is seconds already. Raises
    ValueError if it is not a time above 0.
    """
    return _quantity(
        value, _SECONDS, "a time above 0: seconds as a number, or text such as '90s', '5min', '2h'"
    )


def size_in_bytes(value: str | float) -> int:
    """Return the bytes of a size such as `"8GB"` or `"512MiB"`; a number is bytes already. Raises ValueError if it is
    not a size above 0.
    """
    return int(_quantity(value, _BYTES, "a size above 0: bytes as a number, or text such as '8GB', '512MiB'"))


def _quantity(value: str | float, units: dict[str, int], words: str) -> float:
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        unit = match and units.get(match[2].lower())
        number = float(match[1]) * unit if match and unit else 0.0
    else:
        number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"must be {words}")
    return number


def options_from(text: str) -> dict[str, str]:
    """Return {"rank": "64", "scale": "0.10"} for `"rank=64, scale=0.10"`. Raises ValueError if a part is not
    `key=value`.
    """
    found = options(text)
    if not all((*found, *found.values())):
        raise ValueError(f"must be name=value, name=value: {text!r} has a pair without a name or a value")
    return found


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of the size of a weight file, such as `"1GiB"` or `"500MB"`; a number is bytes already.

    As in accelerate, a lower-case `b` in a decimal unit (`"8Gb"`) means bits. Raises ConfigError if it is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\d+)?)\s*([KMGT]I?B)\s*", str(size), re.IGNORECASE)
    if match is None:
        fix = "give bytes as a number, or a text with a unit such as '5GB' or '512MiB'"
        raise ConfigError(Problem("size", size, fix))
    unit = match[2].lower()
    count = int(float(match[1]) * _BYTES[unit])
    return count // 8 if match[2].endswith("b") and "i" not in unit else count
