"""Small files: replaced as a whole, so that none is ever partly written and no link is followed to another file; or
read as text that anybody may have written: bounded in size, and JSON with one kind of error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from windlass.core.logs import get_logger

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
    processes that write a file at once, one is the last. One that is killed may leave `tmp-NAME-...` beside it
    (`remove_unfinished`). Raises OSError, also where the name is that of a device or a pipe.
    """
    _check_plain(path)
    new = path.with_name(f"tmp-{path.name}-{secrets.token_hex(8)}")
    try:
        with open(open_new(new), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.unlink(new)
        if isinstance(problem, OSError) and problem.filename is None:
            problem.filename = str(path)  # a full disk is reported without the file
        raise


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left of writing a file. Call it where no other process can be writing it."""
    with contextlib.suppress(OSError):
        for left in path.parent.iterdir():
            if re.fullmatch(rf"tmp-{re.escape(path.name)}-[0-9a-f]{{16}}", left.name):
                left.unlink()


MAX_BYTES = 1 << 19  # of a file of settings; a parser takes some thousand times that in memory at worst


def read_text(path: Path) -> str:
    """A file of settings as text.

    Raises:
        OSError: it cannot be read, or is too large for what it should hold. UnicodeDecodeError: it is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES:,} bytes, too many for settings", str(path))
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError if it cannot be read, or is another kind of file: to open a pipe
    would wait for a process that writes to it.
    """
    _check_plain(path)
    return open(path, "rb")


def _check_plain(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads(text, **hooks)`.

    Raises:
        json.JSONDecodeError: also where it is nested too deeply, holds a number of absurdly many digits, or is not
            UTF-8.
    """
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("not UTF-8 text", "", 0) from None
    except ValueError as error:
        if hooks:
            raise  # a hook's own
        raise json.JSONDecodeError(str(error), "", 0) from None


def read_json(path: Path, most: int = -1) -> Any:
    """The JSON of a plain file, of which `most` bytes are read; None if it cannot be read, or is not JSON."""
    with contextlib.suppress(OSError, ValueError), open_plain(path) as file:
        return parse_json(file.read(most))
    return None


def newest_lines(path: Path, most: int) -> Iterator[Any]:
    """Yield the JSON of each whole line in the last bytes of a plain file; a damaged line, and a file that cannot be
    read, are left out.
    """
    with contextlib.suppress(OSError), open_plain(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
        for line in file.read(most).split(b"\n")[:-1]:  # the last one is empty, or is written now
            with contextlib.suppress(ValueError):
                yield parse_json(line)


_logger = get_logger(__name__)


class OutputFolder:
    """Says whether a folder still lies on the disk that it was on when this object was made.

    A folder that was removed or moved may be made again there. With its disk unmounted, the same path leads to the disk
    below, usually the system's own: nothing must be written there.

    Args:
        path: may be made later; its disk is that of the nearest folder above it until then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = _status(path)
        self._device = (found or _nearest(path)).st_dev
        self._inode = None if found is None else found.st_ino

    def check(self) -> None:
        """Call it before the folder is made or written to. Raises OSError if its disk is not there."""
        found = _status(self.path)
        # A share that is mounted again may have another device number; its folder is the same inode.
        is_same = found is not None and found.st_ino == self._inode
        if not is_same and (found or _nearest(self.path)).st_dev != self._device:
            problem = "its path leads to another device than when the run began: the disk is not mounted"
            raise OSError(errno.ENODEV, problem, str(self.path))
        if found is None and self._inode is not None:
            _logger.warning("%s was removed while the run goes on: it is made again", self.path)
        self._inode = None if found is None else found.st_ino
        self._device = self._device if found is None else found.st_dev


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _nearest(path: Path) -> os.stat_result:
    """Of the nearest folder above that exists."""
    above = (_status(parent) for parent in path.absolute().parents)
    return next(status for status in above if status is not None)
