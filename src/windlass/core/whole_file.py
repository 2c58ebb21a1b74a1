"""Small files that are replaced as a whole: none is ever partly written, and no link is followed to another file."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)  # Windows alone has it, and would translate line ends without


def open_new(path: Path) -> int:
    """Return a descriptor to write a file that does not exist yet. Raises FileExistsError if the name is taken, also by
    a link that leads nowhere.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | BINARY, 0o666)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, in place of one that exists: that one remains until the new one is complete on the disk.

    If `path` is a link, the link is replaced, and not what it leads to. A text is written as UTF-8. Of several
    processes that write a file at once, one is the last. One that is killed may leave `tmp-NAME-...` beside it.
    """
    new = path.with_name(f"tmp-{path.name}-{secrets.token_hex(8)}")
    try:
        with open(open_new(new), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
