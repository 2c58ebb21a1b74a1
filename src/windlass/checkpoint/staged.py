"""A checkpoint that is being written: one rank's view of the folder `tmp-checkpoint-N` on its disk.

Its steps (`open`, `write_state`, `seal`, `commit`, `drop`) do not communicate with other ranks: their caller
(`Store.write`, or a writer thread) decides when the ranks agree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.checkpoint import codec, strict_json
from windlass.checkpoint.codec import Encoded
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    is_manifest_name,
    listing,
    manifest_bytes,
    node_manifest_name,
)
from windlass.checkpoint.names import shorten
from windlass.checkpoint.nodes import Disks
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.types import State

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# The state of a rank, or its part of tensors, which it lists itself.
_RANK_FILE = re.compile(
    r"(?:tmp-)?rank-\d{5,}(?:\.files)?\.(?:json|safetensors)|\w+-rank-\d{5,}\.safetensors"
)
_logger = get_logger(__name__)


def rank_stem(rank: int) -> str:
    """Name of a rank's own file pair, without its ending."""
    return f"rank-{rank:05d}"


class StagedCheckpoint:
    """Written by the ranks that share a disk; committed by the first of them, its writer rank, with a single rename."""

    def __init__(
        self,
        target: Path,
        step: int,
        meta: Mapping[str, Any],
        rank: int,
        ranks: int,
        files: Files,
        disks: Disks | None = None,
        names: Iterable[str] = (),
    ) -> None:
        self.target = target
        self.folder = target.with_name("tmp-" + target.name)
        self.step, self.meta = step, meta
        self._rank, self._ranks, self.files = rank, ranks, files
        self._disks = disks or Disks.shared(ranks)
        writer, *self._others = self._disks.members
        self._is_writer = rank == writer
        self._planned = frozenset(names)
        self._written: dict[str, FileEntry] = {}
        self._sealed = False
        self.serial = 0  # of its commit, if the ranks agree on it beforehand

    def open(self) -> None:
        """On the writer rank: create the folder, empty."""
        if self.folder.exists() or self.folder.is_symlink():
            self.files.remove_tree(self.folder)
        self.files.make_folder(self.folder)

    def write_state(self, name: str, state: State | Encoded) -> None:
        """Write a shared state as `NAME.json` (and `NAME.safetensors`), on the writer rank.

        Raises:
            CheckpointError: the name is reserved or used already.
        """
        if not _NAME.fullmatch(name) or name.startswith("rank-") or is_manifest_name(f"{name}.json"):
            raise CheckpointError(
                f"{name!r} cannot name a part of a checkpoint: letters, digits, _ . - only, no 'rank-', no 'manifest'"
            )
        if f"{name}.json" in self._written:
            raise CheckpointError(f"part {name!r} was written already")
        self._written |= codec.save_state(self.folder / name, state, self.files)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a further plain file by its relative name."""
        path = self.folder / name
        self.files.ensure_folder(path.parent)
        self._written[name] = self.files.write(path, [data])

    def write_rank_state(self, state: State | Encoded) -> None:
        """Write this rank's own state as `rank-RRRRR.json` (and `.safetensors`)."""
        self._written |= codec.save_state(self.folder / rank_stem(self._rank), state, self.files)

    def add(self, entries: Mapping[str, FileEntry]) -> None:
        """Register files that were written into the folder through its `Files`, by name."""
        self._written |= entries

    def seal(self) -> None:
        """Make everything this rank wrote durable and known. The writer rank hashes files that other code put into the
        folder; the other ranks leave it a list of their files, which is the last file they write.
        """
        if self._is_writer:
            self._adopt(self.folder, "")
        absent = self._planned - self._written.keys()
        if absent:
            raise CheckpointError(
                f"{self.folder} lacks files that were to be written: {shorten(sorted(absent))}"
            )
        if not self._is_writer:
            # The writer rank does it before the rename.
            self.files.sync_folder(self.folder)
            path = self.folder / f"{rank_stem(self._rank)}.files.json"
            # Renamed once it is on the disk: the writer rank may commit as soon as it reads a list, and this rank has
            # failed if its list cannot be synced (a network file system reports a full disk only then).
            with self.files.replacing(path) as new:
                self.files.write(new, [strict_json.dump(listing(self._written), path.name)])
        self._sealed = True

    def _adopt(self, folder: Path, prefix: str) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = prefix + entry.name
            path = folder / entry.name
            if entry.is_symlink():
                raise CheckpointError(f"{path} is a symbolic link; a checkpoint holds plain files only")
            if entry.is_dir():
                self._adopt(path, name + "/")
                self.files.sync_folder(path)
            elif is_manifest_name(name):
                raise CheckpointError(f"{path} was written by other code; that name is the checkpoint's own")
            elif name not in self._written and not _RANK_FILE.fullmatch(name):
                self.files.sync_file(path)
                self._written[name] = self.files.digest(path)

    def is_sealed_by_others(self) -> bool:
        """On the writer rank: return True if every other rank of this disk has written its list of files, its last."""
        try:
            for rank in self._others:
                self._list_of(rank)
        except (CheckpointError, OSError):
            return False
        return True

    def commit(self, serial: int) -> None:
        """On the writer rank, after all ranks have sealed: write the manifest, then rename the folder to commit it.

        Args:
            serial: higher than that of any checkpoint beside it.

        Raises:
            CheckpointError: a rank has not sealed what it was to write. OSError: a file of it is not there as it was
                written; or the disk refused.
        """
        if not self._sealed:
            raise CheckpointError(f"{self.folder} is not committed: not everything was written")
        entries = self._written | self._entries_of_others()
        entries |= self._others_of_these_names(entries)
        self._check_sizes(entries)
        node, nodes = self._disks.node, self._disks.nodes
        text = manifest_bytes(self.step, self._ranks, entries, self.meta, serial, node, nodes)
        if nodes > 1:
            # If the folders of several nodes are merged, MANIFEST_NAME is that of one of them only.
            self.files.write(self.folder / node_manifest_name(node), [text])
        self.files.write(self.folder / MANIFEST_NAME, [text])
        # Before the rename: a power cut after it must not leave a folder of that name without these entries.
        self.files.sync_folder(self.folder)
        replaced = set_aside(self.target, self.files)
        try:
            self.files.rename(self.folder, self.target)
        except OSError:
            if replaced is not None:
                self.files.rename(replaced, self.target)
            raise
        self.files.sync_folder(self.target.parent)

    def _entries_of_others(self) -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        for rank in self._others:
            path, listed = self._list_of(rank)
            entries |= {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in listed.items()}
            # Not a file of the checkpoint: the manifest has its content.
            self.files.remove_file(path)
        return entries

    def _others_of_these_names(self, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """The files of other code that have names as those of ranks, which are all `known` once ranks have sealed."""
        found: dict[str, FileEntry] = {}
        for name in sorted(os.listdir(self.folder)):
            if _RANK_FILE.fullmatch(name) and name not in known:
                self.files.sync_file(self.folder / name)
                found[name] = self.files.digest(self.folder / name)
        return found

    def _check_sizes(self, entries: Mapping[str, FileEntry]) -> None:
        """Check all files again before the manifest is written: the folder may have been removed meanwhile."""
        for name, entry in entries.items():
            status = os.lstat(self.folder / name)
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
                problem = f"{entry.size:,} bytes were written and {status.st_size:,} are there"
                raise OSError(errno.EIO, problem, str(self.folder / name))

    def _list_of(self, rank: int) -> tuple[Path, dict[str, Any]]:
        """The list of files that another rank wrote, and its path."""
        path = self.folder / f"{rank_stem(rank)}.files.json"
        listed: dict[str, Any] = strict_json.read(path, self.files, limit=MAX_MANIFEST_BYTES)
        return path, listed

    def drop(self) -> None:
        """On the writer rank: remove the folder. What cannot be removed is left for the next save to clear."""
        with contextlib.suppress(OSError):
            if self.folder.exists():
                self.files.remove_tree(self.folder)


def folder_pattern(name: str) -> str:
    """A regular expression for what `Store(name=...)` calls its folders; its group, if it has one, is the step."""
    return re.escape(name).replace(re.escape("{step}"), r"(\d{1,18})")


def set_aside(target: Path, files: Files) -> Path | None:
    """Rename an existing `target`; return its new path, if any.

    A checkpoint becomes `replaced-checkpoint-N`, which counts until its successor is committed, so that a complete one
    exists at every instant. A folder without a manifest was not written by Windlass: it becomes `checkpoint-N.aside`
    and is kept, unless it is empty: scripts create the folder before the save that fills it.
    """
    if not target.exists() and not target.is_symlink():
        return None
    if (target / MANIFEST_NAME).is_file() and not target.is_symlink():
        place = target.with_name("replaced-" + target.name)
        if place.exists():  # superseded by `target`, and could not be removed then
            files.remove_tree(place)
    elif not target.is_symlink() and target.is_dir() and not any(target.iterdir()):
        files.remove_tree(target)
        return None
    else:
        names = (target.with_name(f"{target.name}.aside{number or ''}") for number in range(1000))
        place = next(path for path in names if not path.exists() and not path.is_symlink())
        _logger.warning(
            "%s is not a checkpoint of Windlass (it has no manifest): moved to %s", target, place.name
        )
    files.rename(target, place)
    return place
