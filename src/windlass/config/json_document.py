"""Settings that are a dict, given as JSON text or as the path of a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.config.kinds import typed_words
from windlass.core.plain_text import parse_json, read_text


def read_document(text: str) -> dict[str, Any]:
    """Return the dict in JSON text, or in the JSON file whose path is `text`. Raises ValueError, with the reason, if it
    is neither.
    """
    source = text if text.lstrip().startswith("{") else None
    try:
        value = parse_json(read_text(Path(text).expanduser()) if source is None else source)
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
    assert not isinstance(value, str), "`check` refuses text that cannot be read"
    return dict(value or {})
