"""Replacing a file: the old one exists until the new one is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windlass.checkpoint.files import Files


@contextmanager
def replacing(path: Path, files: Files) -> Iterator[Path]:
    """A temporary name, which is renamed to `path` after the body, or removed after an error. A leftover of an
    interrupted process is removed before.
    """
    new = path.with_name("tmp-" + path.name)
    if new.exists():
        files.remove_file(new)
    try:
        yield new
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_file(new)
        raise
    files.rename(new, path)
