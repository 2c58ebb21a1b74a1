"""The output folder of a run: on which disks it lies, who may write into it, and the checkpoints in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from windlass.checkpoint.background import Saver
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import open_store, upload_files
from windlass.checkpoint.remote import check_remote
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import is_url, local_folder, unwritable
from windlass.core.logs import get_logger
from windlass.core.whole_file import OutputFolder, write_whole
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together

logger = get_logger(__name__)


class RunFolder:
    """Locks the folder against other runs: the writer rank of each disk holds the lock for all ranks. `path` is the
    folder on this machine: a staging folder if `output_dir` is a URL.
    """

    def __init__(self, args: TrainingArguments, all_ranks: Gang) -> None:
        self._place, self._shown, self._all_ranks = args.output_path, str(args.output_dir), all_ranks
        self.path = local_folder(self._place)
        self._disks: Disks | None = None
        self._lock: RunLock | None = None
        self._watch: OutputFolder | None = None

    @property
    def disks(self) -> Disks:
        """Which ranks share the disk of the folder. Collective the first time."""
        if self._disks is None:
            self._disks = find_disks(self._all_ranks, self.path)
        return self._disks

    def manager(self, retention: Retention) -> CheckpointManager:
        """Saves and loads its checkpoints. Collective."""
        return CheckpointManager(open_store(self._place, self._all_ranks, self.disks), retention)

    def upload(self) -> None:
        """Upload the files beside checkpoints if the place is a URL. An error is logged; the files stay."""
        if self._all_ranks.rank != 0:
            return
        try:
            upload_files(self._place)
        except OSError as error:
            logger.error("%s. The run's files are in %s", error.strerror or error, self.path)

    def warn_of_earlier_run(self) -> None:
        """Warn, on the main process, if the folder holds checkpoints of another run. Collective. Raises CheckpointError
        if that cannot be seen; the same on every rank.
        """
        looks, errors = self._all_ranks.rank == 0, (CheckpointError, OSError)
        earlier = together(
            self._all_ranks, lambda: open_store(self._place).committed() if looks else [], errors
        )
        if earlier:
            newest, others = earlier[-1].path.name, len(earlier) - 1
            logger.warning(
                "%s holds another run (%s%s), and this is a fresh one. Its checkpoints count as older than this run's: "
                "save_total_limit and keep_last remove them first, one of the same step is replaced, and from this "
                "run's first save on resume_from_checkpoint=True continues this run. To keep both, choose another "
                "output_dir",
                self._place,
                newest,
                f" and {others} more" if others else "",
            )

    # --- the lock ---------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Make the folder, lock it against other runs, and check that it can be written. Collective. Raises ConfigError
        if another run writes there, or it cannot be written; the same on every rank.
        """
        fix = None
        if self._all_ranks.rank == self.disks.writer_rank:
            try:
                self._watch = None  # each training may begin on another disk
                self.confirm()
                self._check_writable()
            except FolderInUse as error:
                fix = (
                    f"another run is writing to it ({error.holder}): wait for that run or end it, or choose another "
                    "output_dir"
                )
            except OSError as error:
                fix = unwritable(self._shown, error).problems[0].fix
            except ConfigError as error:
                fix = error.problems[0].fix
            except BaseException:
                self.release(None)
                raise
        # Every rank raises, or none: one that went on would wait for the others in its first exchange.
        fixes = [found for found in self._all_ranks.gather_objects(fix) if found is not None]
        if fixes:
            self.release(None)
            raise ConfigError(Problem("output_dir", self._shown, fixes[0]))

    def _check_writable(self) -> None:
        check_writable(str(self.path), self._shown)
        if is_url(self._place) and self._all_ranks.rank == 0:
            check_remote(self._place)
            logger.info("%s: the run works in %s, which WINDLASS_STAGING moves", self._place, self.path)

    def confirm(self) -> None:
        """Check that this process still holds the lock, or take it. For the writer rank of the folder. Raises
        FolderInUse if another run holds it, and OSError if the folder cannot be written, or its disk is unmounted.
        """
        self._lock = self._lock or RunLock(self.path)
        self._watch = self._watch or OutputFolder(self.path)
        self._watch.check()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def release(self, saver: Saver | None) -> None:
        """Release the lock, once the thread of `saver` that still writes there has ended."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if saver is not None and saver.busy:
            lock.release_after(saver.wait)
        else:
            lock.release()


def check_writable(folder: str, shown: str) -> None:
    """Make the output folder and write a page to it, which is removed again; raise ConfigError if that fails."""
    probe = Path(folder, ".windlass-write-test")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_whole(probe, bytes(4096))  # an empty file fits on a full disk too
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        raise unwritable(shown, error) from error
