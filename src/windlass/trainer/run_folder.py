"""The output folder of a run: on which disks it lies, who may write into it, and the checkpoints in it."""

from __future__ import annotations

from typing import Any

from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import open_store, upload_files
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import local_folder
from windlass.core.logs import get_logger
from windlass.core.output_folder import OutputFolder
from windlass.dist.gang import Gang
from windlass.trainer.defaults import unwritable
from windlass.trainer.run_saver import RunSaver

logger = get_logger(__name__)


class RunFolder:
    """Locks the folder against other runs: the writer rank of each disk holds the lock for all ranks.

    Attributes:
        path: where files go on this machine: a staging folder if `place` is a URL.

    Args:
        place: the folder, absolute, or a URL.
        shown: `output_dir` as the user wrote it.
    """

    def __init__(self, place: str, shown: str, gang: Gang) -> None:
        self._place, self._shown, self._gang = place, shown, gang
        self.path = local_folder(place)
        self._disks: Disks | None = None
        self._lock: RunLock | None = None
        self._watch: OutputFolder | None = None

    @classmethod
    def of(cls, args: Any, gang: Gang) -> RunFolder:
        """The output folder of these arguments."""
        return cls(args.output_path, str(args.output_dir), gang)

    @property
    def disks(self) -> Disks:
        """Which ranks share the disk of the folder. Found out once; that is collective."""
        if self._disks is None:
            self._disks = find_disks(self._gang, self.path)
        return self._disks

    def manager(self, retention: Retention) -> CheckpointManager:
        """Saves and loads its checkpoints. Collective."""
        store = open_store(self._place, self._gang, self.disks)
        store.stay_on_disk()
        return CheckpointManager(store, retention)

    def upload(self) -> None:
        """Upload what was written beside checkpoints, if the place is a URL. An error is logged; the files stay."""
        if self._gang.rank != 0:
            return
        try:
            upload_files(self._place)
        except OSError as error:
            logger.error("%s. The run's files are in %s", error.strerror or error, self.path)

    # --- the lock ---------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Keep other runs out from here on. Collective.

        Raises:
            ConfigError: another run writes there, or it cannot be written; the same on every rank.
        """
        fix = None
        if self._gang.rank == self.disks.writer_rank:
            try:
                self.confirm()
            except FolderInUse as error:
                fix = (
                    f"another run is writing to it ({error.holder}): wait for that run or end it, or choose another "
                    "output_dir"
                )
            except OSError as error:
                fix = unwritable(self._shown, error).problems[0].fix
            except BaseException:
                self.release(None)
                raise
        fixes = [told for told in self._gang.gather_objects(fix) if told is not None]
        if fixes:
            self.release(None)
            raise ConfigError(Problem("output_dir", self._shown, fixes[0]))

    def confirm(self) -> None:
        """Check that this process still holds the lock, or take it. For the writer rank of the folder.

        Raises:
            FolderInUse: another run holds it. OSError: the folder cannot be written.
        """
        if self._lock is None:
            self._lock, self._watch = RunLock(self.path), OutputFolder(self.path)
        assert self._watch is not None
        self._watch.check()
        self.path.mkdir(parents=True, exist_ok=True)
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
