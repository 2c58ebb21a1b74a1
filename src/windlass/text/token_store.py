"""Prepared rows on a disk: one folder for each key, complete or not there, prepared by one process at a time.

    manifest.json        key, size and SHA-256 of each file, summary, and its own SHA-256
    input_ids.bin ...    the arrays of `TokenRows`

Every byte is hashed when it is loaded, and the borders of rows are checked. A folder that differs is prepared again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from windlass.checkpoint.files import FileEntry, Files, digest_of
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.core.locations import home_folder
from windlass.core.logs import get_logger
from windlass.core.whole_file import parse_json
from windlass.text.summary import TextSummary
from windlass.text.token_rows import LENGTHS, TokenRows

_MANIFEST = "manifest.json"
_TYPES = {"input_ids": "<i4", "labels": "<i4", "offsets": "<i8", "seq_lengths": "<i4", "documents": "<i8"}
_MAX_MANIFEST = 1 << 24  # bytes
_POLL = 0.1
_logger = get_logger(__name__)
Prepared = tuple[TokenRows, TextSummary]


def default_cache() -> Path:
    """Return the folder of prepared text: `text` in `$WINDLASS_HOME`, else in `~/.cache/windlass`."""
    return home_folder(os.environ) / "text"


class TokenStore:
    """A folder of prepared datasets. `folder` is made if it is missing; other processes and machines may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, Files()
        self._reported = ""  # the last damage: a folder is looked at twice

    def path(self, key: str) -> Path:
        """Return the folder of a prepared dataset, which exists once it is complete."""
        return self.folder / key[:32]

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
        new = self.folder / f"tmp-{key[:32]}"
        if new.exists():  # of a process that was killed
            self._files.remove_tree(new)
        self._files.make_folder(new)
        entries = {}
        for name, values in rows.arrays().items():
            content: Any = np.ascontiguousarray(values, dtype=_TYPES[name])
            chunks = [memoryview(content).cast("B")] if content.size else []
            entry = self._files.write(new / f"{name}.bin", chunks)
            entries[name] = {"size": entry.size, "sha256": entry.sha256}
        body = {"key": key, "files": entries, "summary": summary.to_dict()}
        manifest = {**body, "sha256": _hash(body)}
        self._files.write(new / _MANIFEST, [json.dumps(manifest).encode()])
        if self.path(key).exists():
            self._files.remove_tree(self.path(key))  # it is damaged
        self._files.rename(new, self.path(key))
        self._files.sync_folder(self.folder)

    def _load(self, key: str) -> Prepared | None:
        """Return the rows as mapped files; None if they are not there, or not those of this key."""
        folder = self.path(key)
        if not (folder / _MANIFEST).exists():
            return None
        try:
            if folder.is_symlink():
                raise ValueError("it is a symbolic link")
            body = self._manifest(folder)
            if body["key"] != key:
                return None
            rows = TokenRows(
                **{name: self._array(folder, name, entry) for name, entry in body["files"].items()}
            )
            _check_borders(rows)
            return rows, TextSummary.from_dict(body["summary"])
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            found = f"{folder} is damaged, and is prepared again: {error}"
            if found != self._reported:
                _logger.warning("%s", found)
            self._reported = found
            return None

    def _manifest(self, folder: Path) -> dict[str, Any]:
        body = parse_json(self._files.read(folder / _MANIFEST, _MAX_MANIFEST))
        if not isinstance(body, dict) or "sha256" not in body:
            raise ValueError(f"{_MANIFEST} has no hashes, as those of earlier versions")
        if body.pop("sha256") != _hash(body):
            raise ValueError(f"{_MANIFEST} does not match its hash")
        return body

    def _array(self, folder: Path, name: str, entry: dict[str, Any]) -> Any:
        """An array whose file was just hashed, in the memory of that open file."""
        kind, path = np.dtype(_TYPES[name]), folder / f"{name}.bin"
        with self._files.reading(path) as file:
            if digest_of(file) != FileEntry(entry["size"], entry["sha256"]):
                raise ValueError(f"the content of {path.name} does not match its hash")
            return np.memmap(file, dtype=kind, mode="r") if entry["size"] else np.empty(0, dtype=kind)


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


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
