"""Writing a file whose name another may have: the old file stays until the new one is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windlass.checkpoint.files import Files


@contextmanager
def replacing(path: Path, files: Files) -> Iterator[Path]:
    """The name to write under, which becomes `path` when the body has ended well. What a process that was cut off left
    there is removed before, and a part of the new file afterwards: it only takes room from others.
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
