"""The folder that a run writes to, which may be removed, or whose disk may be detached, at any time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from windlass.core.logs import get_logger

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
