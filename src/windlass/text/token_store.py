"""Prepared rows on a disk: one folder for each key, complete or not there, prepared by one process at a time.

    manifest.json        as that of a checkpoint, with the key and the summary
    input_ids.bin ...    the arrays of `TokenRows`

Every byte is hashed when it is loaded, and the borders of rows are checked. A folder that differs is prepared again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.checkpoint.verified import VerifiedFiles
from windlass.core.locations import at_home, home_folder
from windlass.core.logs import get_logger
from windlass.text.summary import TextSummary
from windlass.text.token_rows import LENGTHS, TokenRows

_TYPES = {"input_ids": "<i4", "labels": "<i4", "offsets": "<i8", "seq_lengths": "<i4", "documents": "<i8"}
_POLL = 0.1
_logger = get_logger(__name__)
Prepared = tuple[TokenRows, TextSummary]


def default_cache() -> Path:
    """Return the folder of prepared text: `text` in `$WINDLASS_HOME`, else in `~/.cache/windlass`."""
    return home_folder(os.environ) / "text"


def kept(cache: TokenStore | str | Path | None, key: str | None, prepare: Callable[[], Prepared]) -> Prepared:
    """`TokenStore.get` in the folder `cache`; what `prepare` returns without a folder or a key."""
    if cache is None or key is None:
        return prepare()
    store = cache if isinstance(cache, TokenStore) else TokenStore(at_home(cache))
    return store.get(key, prepare)


class TokenStore:
    """A folder of prepared datasets.

    Args:
        folder: is made if it is missing; other processes and machines may share it.
        must_keep: `get` raises OSError where the folder cannot be written; by default it warns.
    """

    def __init__(self, folder: Path, *, must_keep: bool = False) -> None:
        self.folder, self._files, self._must_keep = folder, Files(), must_keep
        self._reported = ""  # the last damage: a folder is looked at twice

    def path(self, key: str) -> Path:
        """Return the folder of a prepared dataset, which exists once it is complete."""
        return self.folder / key[:32]

    def _unfinished(self, key: str) -> Path:
        return self.folder / f"tmp-{key[:32]}"

    def get(self, key: str, prepare: Callable[[], Prepared]) -> Prepared:
        """Return what `prepare` returned for `key`, from the disk if it is there.

        One process of all that share the folder prepares; the others wait for it, and succeed it if it dies. If the
        folder cannot be written, nothing is kept, and each process prepares.
        """
        lock = RunLock(self.folder, f".{key[:32]}.lock")
        try:
            self._files.ensure_folder(self.folder)
            found = self._found_or_locked(key, lock)
        except OSError as error:
            if self._must_keep:
                raise
            _logger.warning("prepared text cannot be kept (%s); set WINDLASS_HOME to another folder", error)
            return prepare()
        if found is not None:
            _logger.info("using the text that was prepared before: %s", self.path(key))
            return found
        with lock:
            made = prepare()
            try:
                self._save(key, *made)
            except OSError as error:
                with contextlib.suppress(OSError):  # a full disk has no room for a part of it
                    self._files.remove_tree(self._unfinished(key))
                if self._must_keep:
                    raise
                _logger.warning("prepared text was not kept: %s", error)
            return made

    def _found_or_locked(self, key: str, lock: RunLock) -> Prepared | None:
        """Return what is on the disk, after waiting for a process that prepares it; or None, and the lock is held."""
        is_announced = False
        while (found := self._load(key)) is None:
            try:
                lock.acquire()
            except FolderInUse as error:
                if not is_announced:
                    _logger.warning(
                        "waiting for the process that prepares the same dataset (%s)", error.holder
                    )
                    is_announced = True
                time.sleep(_POLL)
                continue
            found = self._load(key)  # another process may have finished it before the lock was free
            if found is not None:
                lock.release()
            return found
        return found

    def _save(self, key: str, rows: TokenRows, summary: TextSummary) -> None:
        new = self._unfinished(key)
        if new.exists():  # of a process that was killed
            self._files.remove_tree(new)
        self._files.make_folder(new)
        entries = {}
        for name, values in rows.arrays().items():
            content: Any = np.ascontiguousarray(values, dtype=_TYPES[name])
            chunks = [memoryview(content).cast("B")] if content.size else []
            entries[f"{name}.bin"] = self._files.write(new / f"{name}.bin", chunks)
        meta = {"key": key, "summary": summary.to_dict()}
        self._files.write(new / MANIFEST_NAME, [manifest_bytes(0, 1, entries, meta, serial=0)])
        # Not before the new one is complete: a process that is killed in between leaves the folder as it was.
        if self.path(key).exists():
            self._files.remove_tree(self.path(key))  # it is damaged
        self._files.rename(new, self.path(key))
        self._files.sync_folder(self.folder)

    def _load(self, key: str) -> Prepared | None:
        """Return the rows as mapped files; None if they are not there, or not those of this key."""
        folder = self.path(key)
        if not (folder / MANIFEST_NAME).exists():
            return None
        try:
            if folder.is_symlink():
                raise ValueError("it is a symbolic link")
            info = read_manifest(folder, self._files)
            # The folder's name is the first half of the key.
            if info.meta["key"] != key:
                return None
            files = VerifiedFiles(info, self._files)
            rows = TokenRows(**{Path(name).stem: _array(folder / name, files) for name in info.files})
            _check_borders(rows)
            return rows, TextSummary.from_dict(info.meta["summary"])
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            found = f"{folder} is damaged, and is prepared again: {error}"
            if found != self._reported:
                _logger.warning("%s", found)
            self._reported = found
            return None


def _array(path: Path, files: VerifiedFiles) -> Any:
    """An array whose file is hashed when it is opened, in the memory of that open file."""
    kind = np.dtype(_TYPES[path.stem])
    with files.reading(path) as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, dtype=kind) if is_empty else np.memmap(file, dtype=kind, mode="r")


def _check_borders(rows: TokenRows) -> None:
    """Check that the rows and their documents are one behind another in the flat arrays: no index leads out of them.
    Raises ValueError if they are not.
    """
    ids, labels, offsets = rows.flat["input_ids"], rows.flat["labels"], rows.offsets
    if len(ids) != len(labels) or not _tile(offsets, len(ids)):
        raise ValueError("its rows do not lie one behind another in its tokens and labels")
    lengths, documents = rows.flat.get(LENGTHS), rows.documents
    if (lengths is None) != (documents is None):
        raise ValueError("it has only a part of the lengths of its documents")
    if lengths is None or documents is None:
        return
    if len(documents) != len(offsets) or not _tile(documents, len(lengths)):
        raise ValueError("its documents do not lie one behind another in its rows")
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if (lengths < 0).any() or not np.array_equal(ends[documents], offsets):
        raise ValueError("the lengths of its documents are not those of its rows")


def _tile(borders: Any, total: int) -> bool:
    """Return True if `borders` begin at 0, do not decrease, and end at `total`."""
    if not len(borders) or borders[0] != 0 or borders[-1] != total:
        return False
    return bool((borders[1:] >= borders[:-1]).all())
