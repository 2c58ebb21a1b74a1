"""Prepared rows on a disk: one folder for each key, complete or not there, prepared by one process at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from windlass.checkpoint.files import Files
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.config.launch_file import default_file
from windlass.core.logs import get_logger
from windlass.core.plain_text import parse_json
from windlass.text.summary import TextSummary
from windlass.text.token_rows import TokenRows

_MANIFEST = "manifest.json"
_TYPES = {"input_ids": "<i4", "labels": "<i4", "offsets": "<i8", "seq_lengths": "<i4", "documents": "<i8"}
_POLL = 0.1
_logger = get_logger(__name__)
Prepared = tuple[TokenRows, TextSummary]


def default_cache() -> Path:
    """Return the folder of prepared text: `text` in `$WINDLASS_HOME`, else in `~/.cache/windlass`."""
    return default_file(os.environ).parent / "text"


class TokenStore:
    """A folder of prepared datasets. `folder` is made if it is missing; other processes and machines may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, Files()

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
                    _logger.info("waiting for the process that prepares the same dataset (%s)", error.holder)
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
        sizes = {}
        for name, values in rows.arrays().items():
            content: Any = np.ascontiguousarray(values, dtype=_TYPES[name])
            chunks = [memoryview(content).cast("B")] if content.size else []
            sizes[name] = self._files.write(new / f"{name}.bin", chunks).size
        manifest = {"key": key, "sizes": sizes, "summary": summary.to_dict()}
        self._files.write(new / _MANIFEST, [json.dumps(manifest).encode()])
        if self.path(key).exists():
            self._files.remove_tree(self.path(key))  # it is damaged
        self._files.rename(new, self.path(key))
        self._files.sync_folder(self.folder)

    def _load(self, key: str) -> Prepared | None:
        """Return the rows as mapped files; None if they are not there, or not those of this key."""
        folder = self.path(key)
        try:
            manifest = parse_json((folder / _MANIFEST).read_bytes())
            if manifest["key"] != key:
                return None
            arrays = {name: self._array(folder, name, size) for name, size in manifest["sizes"].items()}
            rows = TokenRows(**arrays)
            summary = TextSummary.from_dict(manifest["summary"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            _logger.warning("%s is damaged, and is prepared again: %s", folder, error)
            return None
        return rows, summary

    def _array(self, folder: Path, name: str, size: int) -> Any:
        path = folder / f"{name}.bin"
        if path.stat().st_size != size:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, {size} expected")
        kind = np.dtype(_TYPES[name])
        return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
