"""JSON as checkpoints use it: ASCII bytes, no NaN, no key twice, bounded depth; anything odd is a
`CheckpointError`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from windlass.checkpoint.files import Files
from windlass.core.errors import CheckpointError

MAX_JSON_BYTES = 1 << 27  # written and read: one small object costs some 20 times its text in memory


@dataclass(frozen=True, slots=True)
class PreparedJson:
    """A value of a map that is to be dumped, as ASCII text that is strict JSON already."""

    text: str


def dump(tree: Any, what: str) -> bytes:
    """The bytes of `tree`, a map with each of its keys on a line of its own. `what` names it in errors."""
    text = _lines(tree) if isinstance(tree, dict) else json.dumps(tree, allow_nan=False)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{what} would be {len(text):,} bytes of JSON; at most {MAX_JSON_BYTES:,} are written"
        )
    return text.encode("ascii") + b"\n"


def _lines(tree: dict[str, Any]) -> str:
    """Readable where a person looks, and without `indent`, which costs ten times as long on a large tree."""
    items = [f"{json.dumps(key)}: {_text(value)}" for key, value in tree.items()]
    return "{\n" + ",\n".join(items) + "\n}"


def _text(value: Any) -> str:
    return value.text if isinstance(value, PreparedJson) else json.dumps(value, allow_nan=False)


def parse(data: bytes, what: str, *, allow_nan: bool = False) -> Any:
    """The value in `data`. `what` names it in errors; `allow_nan` accepts the NaN and Infinity of other programs."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            # Called with "NaN", "Infinity" and "-Infinity" alone, which `float` knows.
            parse_constant=float if allow_nan else _no_constant,
        )
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, numbers with absurdly many digits
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None


def read(path: Path, files: Files, *, limit: int = MAX_JSON_BYTES, allow_nan: bool = False) -> Any:
    """The value in a file of at most `limit` bytes; see `parse`."""
    return parse(files.read(path, limit), str(path), allow_nan=allow_nan)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
