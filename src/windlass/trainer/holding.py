"""Who may write into the output folder: one run at a time, on each of the disks that it lies on."""

from __future__ import annotations

from pathlib import Path

from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.core.errors import ConfigError, Problem
from windlass.core.output_folder import OutputFolder
from windlass.dist.gang import Gang
from windlass.trainer.defaults import unwritable
from windlass.trainer.run_saver import RunSaver


class FolderHold:
    """The lock of a run's output folder, which the keeper of each disk holds for all ranks."""

    def __init__(self) -> None:
        self._lock: RunLock | None = None
        self._watch: OutputFolder | None = None

    def take(self, gang: Gang, disks: Disks, folder: Path, shown: str) -> None:
        """Take the lock, or refuse to start. Collective.

        Args:
            shown: `output_dir` as the user wrote it.

        Raises:
            ConfigError: another run writes there, or it cannot be written; the same on every rank.
        """
        fix = None
        if gang.rank == disks.keeper:
            try:
                self.confirm(folder)
            except FolderInUse as error:
                fix = (
                    f"another run is writing to it ({error.holder}): wait for that run or end it, or choose another "
                    "output_dir"
                )
            except OSError as error:
                fix = unwritable(shown, error).problems[0].fix
            except BaseException:
                self.release(None)
                raise
        fixes = [told for told in gang.gather_objects(fix) if told is not None]
        if fixes:
            self.release(None)
            raise ConfigError(Problem("output_dir", shown, fixes[0]))

    def confirm(self, folder: Path) -> None:
        """See that this process still holds the lock, or take it. For the keeper of the folder.

        Raises:
            FolderInUse: another run holds it. OSError: the folder cannot be written.
        """
        if self._lock is None or self._lock.path.parent != folder:
            self.release(None)
            self._lock, self._watch = RunLock(folder), OutputFolder(folder)
        assert self._watch is not None
        self._watch.check()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def release(self, saver: RunSaver | None) -> None:
        """Give the lock up, as soon as a thread of `saver` that still writes there has ended."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if saver is not None and saver.busy:
            lock.release_after(saver.wait)
        else:
            lock.release()
