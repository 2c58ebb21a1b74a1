"""Times, sizes and options as text: `"5min"`, `"8GB"`, `"rank=64, scale=0.1"`."""

from __future__ import annotations

import re

from windlass.core.errors import ConfigError, Problem

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
    options = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"must be 'name=value, name=value'; {part!r} is not such a pair")
        options[key.strip()] = value.strip()
    return options


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
