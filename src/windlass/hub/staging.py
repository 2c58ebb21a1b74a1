"""Files on their way to or from the Hub, in folders that no other process removes while this one lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from windlass.core.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

STAGING = ".windlass-hub"
_UNLOCKED = "new-"
_SURELY_LEFT = 60.0  # seconds


class StagedFiles:
    """A folder in a run's `.windlass-hub`, which belongs to one upload or download. It is made with its first file.

    It is locked by the system until `remove()` or the end of the process, so that several runs, commands and publishers
    may work in the folder of one run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._made: Path | None = None
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        if self._made is None:
            (self._run / STAGING).mkdir(parents=True, exist_ok=True)
            # It is locked before it has a name by which it could be taken for that of a killed process.
            made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=self._run / STAGING))
            self._lock = _locked(made)
            self._made = made.rename(made.with_name(f"staged-{made.name}"))
        return self._made

    def link(self, files: Mapping[str, Path]) -> None:
        """Make links to these files (path in the folder -> file), or copies on a disk without links. Their originals
        may be removed. Raises CheckpointError if one is a symbolic link, which may lead to a file of this user that is
        not the run's.
        """
        for name, path in files.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _refuse_link(path, path)
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target, follow_symlinks=False)
            _refuse_link(target, path)  # it may have been replaced meanwhile

    def remove(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_stale(run: Path) -> None:
    """Remove the folders of processes that were killed; none where the disk has no locks, but for those that never got
    their name.
    """
    for left in (run / STAGING).glob(f"{_UNLOCKED}*"):
        with contextlib.suppress(OSError):
            # Another process may be about to lock it, which takes no minute.
            if time.time() - left.stat().st_mtime > _SURELY_LEFT:
                left.rmdir()
    for left in (run / STAGING).glob("staged-*"):
        lock = _locked(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _refuse_link(path: Path, shown: Path) -> None:
    if path.is_symlink():
        raise CheckpointError(
            f"{shown} is a symbolic link; only plain files are published: put a copy there, or remove it"
        )


def _locked(folder: Path) -> int | None:
    """Lock a folder, and return what holds the lock; None if another process has it, or there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
