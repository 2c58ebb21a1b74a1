"""The key of a preparation: equal if, and only if, all that decides its result is equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from windlass.core.optional import version_of
from windlass.text.tables import is_table, table_bytes
from windlass.text.text_options import TextOptions

# Read by the preparation, but without influence on its result. The text that a formatting function returns is hashed
# in place of the function.
_WITHOUT_INFLUENCE = ("num_proc", "formatting_func")
_PACKAGES = ("transformers", "tokenizers", "jinja2")


def content_key(dataset: Any, tokenizer: Any, options: TextOptions) -> str | None:
    """Return the SHA-256 of the rows, the tokenizer, the options and the code, in hex.

    None if a row holds what has no JSON form, so that two datasets cannot be compared.
    """
    digest = hashlib.sha256(_code().encode())
    for part in _settings(tokenizer, options):
        digest.update(hashlib.sha256(part).digest())
    try:
        for piece in table_bytes(dataset) if is_table(dataset) else _rows(dataset):
            digest.update(piece)
    except (TypeError, ValueError, RecursionError):
        return None
    return digest.hexdigest()


def _rows(dataset: Iterable[Any]) -> Iterator[bytes]:
    for row in dataset:
        yield json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _settings(tokenizer: Any, options: TextOptions) -> Iterator[bytes]:
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _WITHOUT_INFLUENCE}
    yield json.dumps(given, sort_keys=True, default=repr).encode()
    template = options.chat_template or tokenizer.chat_template
    yield json.dumps(template).encode()
    if "strftime_now" in json.dumps(template):
        yield date.today().isoformat().encode()  # the template writes the date of today into the text
    yield type(tokenizer).__name__.encode()
    yield json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str).encode()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        yield json.dumps(getattr(backend, "encode_special_tokens", False)).encode()  # not a part of its JSON
        # truncation and padding are what the last call set
        state = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
        yield json.dumps(
            state
        ).encode()  # all that a fast tokenizer encodes with, wherever it was loaded from
        return
    yield json.dumps(tokenizer.init_kwargs, sort_keys=True, default=str).encode()
    yield json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    vocabulary = getattr(tokenizer, "vocab_file", None)
    if vocabulary and Path(vocabulary).is_file():
        yield Path(vocabulary).read_bytes()


@cache
def _code() -> str:
    """The source of this room, and the versions of the packages that it calls."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(sources).hexdigest() + "".join(version_of(name) or "" for name in _PACKAGES)
