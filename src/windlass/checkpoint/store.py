"""The checkpoints in a folder: finding complete ones, and committing new ones.

Commit protocol (the layout is in `docs/checkpoints.md`): every rank writes and fsyncs its files in `tmp-checkpoint-N`;
the ranks vote; rank 0 writes the manifest with the size and hash of every file, fsyncs, renames the folder to
`checkpoint-N` and fsyncs the parent. Before the rename the checkpoint does not exist, after it it is complete.
Retention removes older ones only later. If machines have disks of their own (see `nodes`), the first rank of each does
this for its disk, and a checkpoint must be complete on all of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from windlass.checkpoint.files import Files, is_unreachable
from windlass.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointInfo,
    check_content,
    check_sizes,
    is_manifest_name,
    read_manifest,
)
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.staged import StagedCheckpoint, folder_pattern
from windlass.core.errors import CheckpointError
from windlass.core.locations import named
from windlass.core.logs import get_logger
from windlass.dist.ending import leaves_others
from windlass.dist.gang import Gang

_logger = get_logger(__name__)
# `Store.list` hides the built-in name inside its class.
_Infos = list[CheckpointInfo]
_Paths = list[Path]
_Skipped = list[tuple[Path, str]]  # where, and why it is not whole
_Order = tuple[int, int]  # serial and step
_T = TypeVar("_T")
# How names begin of folders that interrupted saves and replacements leave.
LEFTOVERS = ("tmp-", "replaced-")


def no_checkpoint(where: str, skipped: str = "") -> str:
    """Describe a folder that a run cannot be resumed from; `skipped` are lines on the folders that were looked at."""
    fix = 'to start a new run if there is none, resume from "auto" (resume_from_checkpoint="auto", --resume auto)'
    return f"No valid checkpoint found in output directory ({where}); {fix}{skipped}"


def is_checkpoint(path: Path) -> bool:
    """Return True if there is a checkpoint at `path`; its content is not checked."""
    places = (path, path.parent / f"replaced-{path.name}")
    return any((place / MANIFEST_NAME).is_file() for place in places)


class SaveDropped(CheckpointError):  # noqa: N818 (what happened, not what is wrong here: this rank did its part)
    """A checkpoint was dropped because another rank could not write its part."""


class Store:
    """The checkpoints of one run, in `root`.

    Args:
        all_ranks: the ranks that save together; one by default.
        disks: which ranks see the same folder; all by default.
        name: of the folder of a checkpoint; without `{step}` there is one folder, which each save replaces.

    Attributes:
        pattern: a regular expression for the names of its folders.
        is_writer: this rank creates, commits and removes the folders of its disk; the others only write into them.
    """

    def __init__(
        self,
        root: Path,
        *,
        all_ranks: Gang | None = None,
        disks: Disks | None = None,
        files: Files | None = None,
        name: str = "checkpoint-{step}",
    ) -> None:
        self.root = Path(root)
        self._name = name
        self.pattern = folder_pattern(name)
        self._folder = re.compile(rf"(?:replaced-)?{self.pattern}")
        self._leftover = re.compile(rf"tmp-(?:removed-)?(?:replaced-)?{self.pattern}")
        all_ranks = all_ranks or Gang()
        self.rank, self.ranks = all_ranks.rank, all_ranks.size
        self.vote, self.barrier, self.gather = all_ranks.vote, all_ranks.barrier, all_ranks.gather_objects
        self.disks = disks or Disks.shared(all_ranks.size)
        self.is_writer = self.rank == self.disks.writer_rank
        self._on_all: _Order | None = None
        self.files = files or Files()

    # --- looking

    def path_for(self, step: int) -> Path:
        return self.root / self._name.replace("{step}", str(step))

    def list(self) -> _Infos:
        """The committed checkpoints here (readable manifest; content not checked), in order of their commits."""
        found = []
        for path in self.folders():
            with contextlib.suppress(CheckpointError, OSError):
                found.append(self._read(path))
        return sorted(found, key=lambda info: info.order)

    def committed(self) -> _Infos:
        """The committed checkpoints, local and remote, in order of their commits."""
        return self.list()

    def _elsewhere(self) -> _Infos:
        """The committed checkpoints that are known to be in a remote folder."""
        return []

    def whole(self) -> _Infos:
        """Committed checkpoints that have all their files in their sizes; retention counts these."""
        found = []
        for info in self.list():
            with contextlib.suppress(CheckpointError, OSError):
                check_sizes(info)
                found.append(info)
        return found

    def is_fresh(self) -> bool:
        """Return True if there is no checkpoint, complete or not."""
        return not self.folders()

    def is_committed(self, path: Path) -> bool:
        """Return True if there is a checkpoint at `path`; its content is not checked."""
        return is_checkpoint(path)

    def folders(self) -> _Paths:
        """The folders that are checkpoints by their names, complete or not, in order of their steps."""
        if not self.root.is_dir():
            return []
        numbered = []
        for path in self.root.iterdir():
            is_ours = self._folder.fullmatch(path.name) is not None
            if is_ours and path.is_dir() and not self._is_superseded(path):
                numbered.append((self._step_in(path) or 0, path))
        return [path for _, path in sorted(numbered)]

    def _step_in(self, path: Path) -> int | None:
        """The step in the name of a folder, None if names have none."""
        match = self._folder.fullmatch(path.name)
        return int(match[1]) if match and match.re.groups else None

    def _is_superseded(self, path: Path) -> bool:
        """Return True for a replaced checkpoint whose successor exists."""
        successor = path.with_name(path.name.removeprefix("replaced-"))
        return successor != path and (successor / MANIFEST_NAME).is_file()

    def _read(self, path: Path) -> CheckpointInfo:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link")
        info = read_manifest(path, self.files)
        if self._step_in(path) not in (None, info.step):
            raise CheckpointError(f"its manifest is of step {info.step}")
        return info

    def verify(self, path: Path | str) -> CheckpointInfo:
        """Check every byte of the checkpoint at `path`.

        Raises:
            CheckpointError: "Can't find a valid checkpoint at PATH", with the file and what is wrong with it.
        """
        path = named(Path(path))
        try:
            interim = path.with_name("replaced-" + path.name)
            if not (path / MANIFEST_NAME).exists() and (interim / MANIFEST_NAME).is_file():
                path = interim  # the process ended between the two renames of a replacement; the next save completes it
            if not path.is_dir():
                raise CheckpointError("there is no such folder")
            # The folder of a run in place of one of its checkpoints is a common mistake.
            if not (path / MANIFEST_NAME).exists() and (held := Store(path).folders()):
                raise CheckpointError(
                    f"it holds checkpoints and is none itself: name one of them, such as {held[-1]}"
                )
            info = self._read(path)
            return check_content(info, self.files)
        except CheckpointError as error:
            raise CheckpointError(f"Can't find a valid checkpoint at {path}: {error}") from error
        except OSError as error:
            raise CheckpointError(
                f"Can't find a valid checkpoint at {path}: it cannot be read ({error})"
            ) from error

    def newest_verified(self) -> tuple[Path | None, _Skipped]:
        """The last committed checkpoint that passes `verify`, if any, and the newer ones with the reasons. One whose
        manifest cannot be read counts as newer.
        """
        info, skipped = self._newest()
        return (None if info is None else info.path), skipped

    def _newest(self) -> tuple[CheckpointInfo | None, _Skipped]:
        skipped: _Skipped = []
        for path in self._newest_first():
            try:
                return self.verify(path), skipped
            except CheckpointError as error:
                skipped.append((path, str(error)))
        return None, skipped

    def _newest_first(self) -> _Paths:
        return sorted(self.folders(), key=self._age_rank, reverse=True)

    def _age_rank(self, path: Path) -> tuple[bool, tuple[int, int]]:
        """Sort key: the commit; unreadable manifests come last, by the step in their names."""
        try:
            return False, self._read(path).order
        except (CheckpointError, OSError):
            return True, (0, self._step_in(path) or 0)

    def resume_point(self, which: Literal[True] | str | Path) -> CheckpointInfo:
        """The checkpoint for `resume_from_checkpoint`, verified: True takes the newest and warns of skipped ones, a
        path takes exactly that.

        Raises:
            CheckpointError: "No valid checkpoint found in output directory (PATH)", or the one of `verify`.
        """
        if which is not True:
            path = Path(which)
            # A link that the user names, such as `latest`, leads to one; a link among checkpoints is none itself.
            return self.verify(Path(os.path.realpath(path)) if path.is_symlink() else path)
        info, skipped = self._newest()
        reasons = "".join(f"\n  - {why}" for _, why in skipped)
        if info is None:
            raise CheckpointError(no_checkpoint(str(self.root), reasons))
        if skipped:
            _logger.warning(
                "Resuming from %s; folders that are newer, or may be, were skipped:%s", info.path, reasons
            )
        return info

    # --- writing

    def write(
        self,
        step: int,
        meta: Mapping[str, Any],
        body: Callable[[StagedCheckpoint], None],
        *,
        names: Iterable[str] = (),
        needed: int = 0,
    ) -> None:
        """Write checkpoint `step`: every rank calls it, `body` writes the rank's parts into the staged checkpoint,
        which is committed once all have written.

        An exception at any instant, also one that a signal handler raises, leaves a staging folder or a whole
        checkpoint. (This is not a context manager: an exception between its body and its exit would not reach it.)

        Args:
            meta: plain values kept in the manifest.
            names: files that `body` is to write on this rank; the checkpoint is not committed without one of them.
            needed: bytes the whole checkpoint takes; more than the disk has free fails before anything is written.

        Raises:
            SaveDropped: another rank failed. Whatever failed on this rank is raised as it is. Either way the staged
                checkpoint is dropped on every rank and all earlier checkpoints remain.
        """
        staged = self.begin(step, meta, names=names, needed=needed)

        def fill() -> None:
            body(staged)
            staged.seal()

        try:
            self.on_all_ranks(step, fill)
            self.on_all_ranks(step, lambda: self.commit(staged))
            if self.disks.nodes > 1:
                self._on_all = staged.serial, step
        except BaseException:
            self.drop(staged)
            raise

    # The steps of a save, each a rank's own part of it: where the ranks agree in between is their caller's matter.

    def begin(
        self, step: int, meta: Mapping[str, Any], *, names: Iterable[str] = (), needed: int = 0
    ) -> StagedCheckpoint:
        """This rank's view of a checkpoint to be written, whose folder is there. Collective; see `write`.

        With several disks, the ranks agree here on the save's serial.
        """
        staged = StagedCheckpoint(
            self.path_for(step), step, meta, self.rank, self.ranks, self.files, self.disks, names
        )
        try:
            if self.disks.nodes > 1:
                staged.serial = self._agree_on_serial(step)
            self.on_all_ranks(step, lambda: self._open(staged, needed))
        except BaseException:
            self.drop(staged)
            raise
        return staged

    def _agree_on_serial(self, step: int) -> int:
        """One more than the highest on any disk: a commit that one of them missed counts. Collective."""
        infos = self.on_all_ranks(step, lambda: self.committed() if self.is_writer else None)
        gathered = self.gather(None if infos is None else [info.order for info in infos])
        of_nodes = [set(orders) for orders in gathered if orders is not None]
        self._on_all = max(set[_Order].intersection(*of_nodes), default=None)
        return max((serial for orders in of_nodes for serial, _ in orders), default=0) + 1

    def spared(self) -> _Paths:
        """What retention must not remove: with several disks, the newest checkpoint that is known to be committed on
        all of them. That is the previous one, until the ranks have agreed again.
        """
        return [] if self._on_all is None else [i.path for i in self.list() if i.order == self._on_all]

    @property
    def writers(self) -> int:
        """How many ranks write to this rank's disk."""
        return len(self.disks.members)

    def _open(self, staged: StagedCheckpoint, needed: int) -> None:
        """The writer rank makes room and the folder, into which the others may write once it has returned."""
        if self.is_writer:
            self._prepare(needed)
            staged.open()

    def commit(self, staged: StagedCheckpoint) -> None:
        """Commit on the writer rank, after all ranks have sealed."""
        if self.is_writer:
            staged.commit(staged.serial or self._next_serial())
            # The checkpoint that this one replaced is among them: until now it was the complete one of its name.
            self._remove_leftovers()

    def drop(self, staged: StagedCheckpoint) -> None:
        """Remove the staged checkpoint. What cannot be removed is left for the next save to clear."""
        if self.is_writer:
            staged.drop()

    def on_all_ranks(self, step: int, work: Callable[[], _T]) -> _T:
        """Call `work` on every rank and go on, with what it gave here, only if it returned on all. An interrupt is
        voted on too: the process that got it ends, the others must not wait for it.

        Raises:
            SaveDropped: it failed on another rank.
        """
        try:
            result = work()
        except BaseException as error:
            if not leaves_others(error):  # the others may be in another exchange
                self.vote(False)
            raise
        if not self.vote(True):
            raise SaveDropped(
                f"{self.path_for(step).name} was dropped: another rank could not write its part"
            )
        return result

    def _prepare(self, needed: int) -> None:
        self.files.ensure_folder(self.root)
        self._recover()
        self._remove_leftovers()
        # Now and not when the disk is full, which is at the end of a long write.
        free = self.files.free_bytes(self.root)
        if needed > free:
            raise OSError(
                errno.ENOSPC, f"the checkpoint needs {needed:,} bytes and {free:,} are free", str(self.root)
            )

    def _next_serial(self) -> int:
        """One more than that of any checkpoint here.

        Raises:
            OSError: one of them cannot be looked at now; the new one might come before it.
        """
        serials = [0]
        for path in self.folders():
            try:
                serials.append(self._read(path).serial)
            except (CheckpointError, OSError) as error:
                if is_unreachable(error):
                    raise OSError(errno.EIO, f"the checkpoints there cannot be listed: {error}") from error
        return max([*serials, *(info.serial for info in self._elsewhere())]) + 1

    def _recover(self) -> None:
        """Restore the name of a replaced checkpoint if the process ended between the two renames."""
        for path in self.folders():
            if path.name.startswith("replaced-"):
                target = path.with_name(path.name.removeprefix("replaced-"))
                if not target.exists():
                    # Durable with the next commit; until then both names are looked for.
                    self.files.rename(path, target)

    def _remove_leftovers(self) -> None:
        """Remove files that interrupted saves and removals left, on the writer rank; errors are ignored."""
        with contextlib.suppress(OSError):
            for path in sorted(self.root.iterdir()):
                superseded = path.name.startswith("replaced-") and self._is_superseded(path)
                if superseded:
                    self._keep_other_files(path)
                if superseded or self._leftover.fullmatch(path.name):
                    self.remove(path)

    def _keep_other_files(self, replaced: Path) -> None:
        """Move what a script put beside the files of a checkpoint to the one that replaced it."""
        successor = replaced.with_name(replaced.name.removeprefix("replaced-"))
        with contextlib.suppress(CheckpointError):
            own = read_manifest(replaced, self.files).files
            for path in sorted(replaced.rglob("*")):
                name = path.relative_to(replaced).as_posix()
                is_folder = path.is_dir() and not path.is_symlink()
                if is_folder or name in own or is_manifest_name(name) or os.path.lexists(successor / name):
                    continue
                self.files.ensure_folder((successor / name).parent)
                self.files.rename(path, successor / name)

    def remove(self, path: Path) -> None:
        """Remove a folder such that no instant shows it half removed under its own name."""
        if not self._leftover.fullmatch(path.name):
            doomed = path.with_name("tmp-removed-" + path.name)
            if doomed.exists():
                self.files.remove_tree(doomed)
            self.files.rename(path, doomed)
            path = doomed
        self.files.remove_tree(path)
