"""Checkpoints in a remote folder (`s3://`, `gs://`, ...), through fsspec.

An object store has no rename. So the data files of a checkpoint are uploaded first and its manifest last: that upload
is the commit. A checkpoint is removed in the other order. A step that is saved again gets a folder of another name
(`checkpoint-20-again-1`), and the older one is removed once the new manifest is uploaded.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.checkpoint.files import CHUNK, Files
from windlass.checkpoint.history import is_segment
from windlass.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointInfo,
    node_manifest_name,
    parse_manifest,
)
from windlass.checkpoint.split import SPLIT_INDEX_NAME, left_over
from windlass.checkpoint.staged import folder_pattern, set_aside
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.core.errors import CheckpointError, ConfigError, MissingDependencyError, Problem
from windlass.core.locations import scheme_of
from windlass.core.logs import get_logger
from windlass.core.optional import require
from windlass.core.redact import redact_text
from windlass.core.upload_log import note_upload

_logger = get_logger(__name__)
# Names in a run's folder that are uploaded as checkpoints or not at all.
_NOT_LOOSE = re.compile(r"(?:tmp-|replaced-)?checkpoint-\d+.*|tmp-.*|\.windlass-.*")
_NODE = re.compile(r"node-\d{5,}")
# Loose files up to this size (bytes) are read at once, so that a log may grow during its upload.
_SMALL = 1 << 24


class RemoteFolder:
    """One remote folder; names in it are relative, with `/`. Every failure is an `OSError`.

    Raises:
        ConfigError: no package for the scheme of the URL is installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.shown = redact_text(self.url)
        self._system, self._root = _open(self.url)

    def before(self, operation: str, name: str) -> None:
        """Called before each operation; tests inject faults here."""

    def child(self, name: str) -> RemoteFolder:
        """A folder in this one."""
        return type(self)(f"{self.url}/{name}")

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder; none if it does not exist."""
        with self._doing("list", folder):
            # fsspec may remember listings, which other processes have made out of date.
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})

    def has(self, name: str) -> bool:
        with self._doing("look for", name):
            self._system.invalidate_cache()
            try:
                # Not `isfile`, which returns False for any error, too: a whole checkpoint would be taken for the rest
                # of an interrupted upload, and removed.
                return bool(self._system.info(self._at(name))["type"] != "directory")
            except (FileNotFoundError, NotADirectoryError):
                return False

    def put(self, source: Path, name: str) -> None:
        """Upload a file, and check its length there."""
        with self._doing("upload", name):
            self._system.put_file(str(source), self._at(name))
            self._system.invalidate_cache()
            size, expected = self._system.size(self._at(name)), source.stat().st_size
            if size != expected:
                raise OSError(errno.EIO, f"{size} of {expected} bytes arrived")

    def copy(self, source: str, name: str, size: int) -> bool:
        """Copy a file within the folder; return False if the service cannot, or the length differs."""
        with contextlib.suppress(OSError), self._doing("copy", name):
            self._system.cp_file(self._at(source), self._at(name))
            self._system.invalidate_cache()
            return bool(self._system.size(self._at(name)) == size)
        return False

    def write(self, name: str, data: bytes) -> None:
        """Write a small file at once."""
        with self._doing("upload", name):
            self._system.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(self._at(name), data)

    def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        with self._doing("read", name), self._system.open(self._at(name), "rb") as file:
            # One byte more than allowed shows that there is more, without the whole of it.
            data = bytes(file.read(limit + 1))
        if len(data) > limit:
            raise CheckpointError(f"{self.shown}/{name} has more than {limit:,} bytes")
        return data

    def chunks(self, name: str, limit: int | None = None) -> Iterator[bytes]:
        """The content of a file, in pieces. Raises CheckpointError after `limit` bytes if it has more."""
        got = 0
        with self._doing("download", name), self._system.open(self._at(name), "rb") as file:
            while piece := file.read(CHUNK):
                got += len(piece)
                if limit is not None and got > limit:
                    raise CheckpointError(f"{self.shown}/{name} is damaged: it has more than {limit:,} bytes")
                yield piece

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it."""
        with self._doing("remove", name), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _doing(self, what: str, name: str) -> Iterator[None]:
        try:
            self.before(what, name)
            yield
        except (CheckpointError, GeneratorExit):
            raise
        except Exception as error:  # every service has errors of its own
            problem = f"cannot {what} {self.shown}/{name} ({type(error).__name__}: {error})"
            raise OSError(errno.EIO, redact_text(problem)) from quiet(error)


def _open(url: str) -> tuple[Any, str]:
    scheme = scheme_of(url)
    try:
        fsspec: Any = require("fsspec", f"write to {scheme}:// folders")
        registry: Any = require("fsspec.registry", f"write to {scheme}:// folders")
        known = registry.known_implementations.get(scheme)
        if known is None and scheme not in registry.available_protocols():
            raise ConfigError(Problem("output_dir", url, f"no such kind of folder is known as {scheme}://"))
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except MissingDependencyError as error:
        raise ConfigError(Problem("output_dir", url, str(error))) from quiet(error)
    except ImportError as error:
        package = known["class"].split(".")[0] if known else scheme
        fix = f"{scheme}:// needs the package {package}. Install it with: pip install {package}"
        raise ConfigError(Problem("output_dir", url, fix)) from quiet(error)
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(Problem("output_dir", url, f"it can't be opened: {error}")) from quiet(error)
    if hasattr(system, "auto_mkdir"):
        system.auto_mkdir = True  # of file systems with real folders
    return system, str(root).rstrip("/")


def quiet(error: Exception) -> Exception | None:
    """The cause to show in a traceback: none if its text has credentials."""
    return error if redact_text(str(error)) == str(error) else None


def check_remote(url: str) -> None:
    """Write a small file to `url`, read it and remove it. Raises ConfigError if one of these fails."""
    remote, probe = RemoteFolder(url), ".windlass-write-test"
    try:
        remote.write(probe, b"windlass")
        arrived = remote.read(probe, 100)
        remote.remove(probe)
    except OSError as error:
        fix = f"it can't be written: {error.strerror}. Check the address and the credentials of this machine"
        raise ConfigError(Problem("output_dir", url, fix)) from quiet(error)
    if arrived != b"windlass":
        raise ConfigError(Problem("output_dir", url, "what is written there does not read back"))


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A committed checkpoint in the remote folder `name`; the path of `info` is that on this machine."""

    name: str
    info: CheckpointInfo


class Mirror:
    """The checkpoints of a run in a remote folder.

    Args:
        root: the folder of this machine.
        remote: the folder of the checkpoints.
        loose: the folder of other files of the run; None if another process uploads them.
        name: of the folder of a checkpoint (see `Store`).
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteFolder,
        loose: RemoteFolder | None = None,
        name: str = "checkpoint-{step}",
    ) -> None:
        self._pattern = re.compile(rf"({folder_pattern(name)})(?:-again-\d{{1,9}})?")
        # A folder whose name the user chose may be another program's: without a manifest it is never removed.
        self._users = name if "{step}" not in name else None
        self.root, self.remote, self._loose = root, remote, loose
        self._known: dict[str, CheckpointInfo] = {}
        self._sent: dict[str, tuple[int, int]] = {}

    def list(self) -> Sequence[Uploaded]:
        """Checkpoints with a readable manifest, in order of their commits. Raises OSError if the folder cannot be
        reached.
        """
        found = []
        for name in self._names():
            info = self._info(name)
            if info is not None:
                found.append(Uploaded(name, info))
        return sorted(found, key=lambda one: one.info.order)

    def _names(self) -> Sequence[str]:
        return [name for name in self.remote.names() if self._pattern.fullmatch(name)]

    def _info(self, name: str) -> CheckpointInfo | None:
        if name not in self._known:
            # Not by `read` alone, for which a file that is missing and a service that fails are both an OSError.
            if not self.remote.has(f"{name}/{MANIFEST_NAME}"):
                return None
            match = self._pattern.fullmatch(name)
            assert match is not None
            try:
                data = self.remote.read(f"{name}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
                self._known[name] = parse_manifest(self.root / match[1], data)
            except CheckpointError as error:
                _logger.warning("%s/%s is not whole: %s", self.remote.shown, name, error)
                return None
        return self._known[name]

    @property
    def seen(self) -> Sequence[CheckpointInfo]:
        """The checkpoints that were last known to exist there."""
        return list(self._known.values())

    def of_other_nodes(self) -> bool:
        """Return True if machines with disks of their own wrote here."""
        return any(_NODE.fullmatch(name) for name in self.remote.names())

    def upload(self, info: CheckpointInfo) -> None:
        """Upload a checkpoint: its manifest last. Raises OSError if it did not arrive; earlier ones remain."""
        try:
            self._upload(info)
        except OSError as error:
            problem = redact_text(str(error.strerror or error))
            note_upload(self.root, info.path.name, info.step, problem)
            raise
        note_upload(self.root, info.path.name, info.step)

    def _upload(self, info: CheckpointInfo) -> None:
        name = self._free_name(info.path.name)
        shared = self._shared_files(info)
        for file, entry in info.files.items():
            if file not in shared or not self.remote.copy(
                f"{shared[file]}/{file}", f"{name}/{file}", entry.size
            ):
                self.remote.put(info.path / file, f"{name}/{file}")
        if info.nodes > 1:
            for node in info.held:
                own = node_manifest_name(node)
                self.remote.put(info.path / own, f"{name}/{own}")
        self.remote.put(info.path / MANIFEST_NAME, f"{name}/{MANIFEST_NAME}")
        self._known[name] = info
        for older in self.list():
            if older.info.path == info.path and older.name != name:
                self._remove(older.name)
        self._clear()

    def _shared_files(self, info: CheckpointInfo) -> dict[str, str]:
        """Uploaded segments of a long history, and the newest folder of each."""
        older = sorted(self._known.items(), key=lambda item: item[1].order)
        return {
            file: name
            for name, known in older
            for file, entry in known.files.items()
            if is_segment(file) and info.files.get(file) == entry
        }

    def _clear(self) -> None:
        """Remove files that interrupted uploads and removals left; errors are ignored."""
        with contextlib.suppress(OSError):
            for name in self._names():
                if name not in self._known and self._is_cut_off(name):
                    self._remove(name)

    def _is_cut_off(self, name: str) -> bool:
        """Return True if an interrupted upload or removal left this folder."""
        return name != self._users and not self.remote.has(f"{name}/{MANIFEST_NAME}")

    def _free_name(self, stem: str) -> str:
        """An unused name; files of an interrupted upload under it are removed."""
        taken = set(self._names())
        names = itertools.chain([stem], (f"{stem}-again-{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in taken or self._is_cut_off(name))
        if name in taken:
            self._remove(name)
        return name

    def remove(self, path: Path) -> None:
        """Remove the remote counterpart of the local folder `path`. Raises OSError if the service refused."""
        for one in self.list():
            if one.info.path == path:
                self._remove(one.name)

    def _remove(self, name: str) -> None:
        self._known.pop(name, None)
        # The manifest first: what an interrupted removal leaves must not look complete.
        if self.remote.has(f"{name}/{MANIFEST_NAME}"):
            self.remote.remove(f"{name}/{MANIFEST_NAME}")
        self.remote.remove(name)

    def fetch(self, one: Uploaded, files: Files) -> None:
        """Download a checkpoint, checking every byte against its manifest.

        Raises:
            CheckpointError: it is damaged. OSError: the service or the disk failed.
        """
        target = one.info.path
        staged = target.with_name("tmp-" + target.name)
        if staged.exists() or staged.is_symlink():
            files.remove_tree(staged)
        files.ensure_folder(target.parent)
        files.make_folder(staged)
        for name, entry in one.info.files.items():
            files.ensure_folder((staged / name).parent)
            arrived = files.write(staged / name, self.remote.chunks(f"{one.name}/{name}", entry.size))
            if arrived != entry:
                raise CheckpointError(
                    f"{self.remote.shown}/{one.name}/{name} is damaged: it does not match the manifest"
                )
        manifests = [MANIFEST_NAME]
        if one.info.nodes > 1:
            manifests += [node_manifest_name(node) for node in one.info.held]
        for name in manifests:
            files.write(staged / name, [self.remote.read(f"{one.name}/{name}", MAX_MANIFEST_BYTES)])
        files.sync_folder(staged)
        replaced = set_aside(target, files)
        files.rename(staged, target)
        files.sync_folder(target.parent)
        if replaced is not None and replaced.name.startswith("replaced-"):
            files.remove_tree(replaced)

    # --- other files of the run: logs, reports, the final model

    def upload_loose(self) -> None:
        """Upload what changed since the last time, checkpoints aside. Raises OSError if something did not arrive."""
        if self._loose is None or not self.root.is_dir():
            return
        # In the order in which they were written: a file that says that others are complete is the last of them.
        for _, path in sorted(self._loose_files()):
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                self._send(self._loose, path)
        # Weights of an earlier run in another number of files.
        here = {path.name for path in self.root.iterdir()}
        if WEIGHTS_NAME in here or SPLIT_INDEX_NAME in here:
            for name in left_over(self._loose.names(), here):
                self._loose.remove(name)

    def _loose_files(self) -> Iterator[tuple[int, Path]]:
        """Yield the files beside checkpoints, each after the time at which it was written."""
        for top in self.root.iterdir():
            if not _NOT_LOOSE.fullmatch(top.name) and not top.is_symlink():
                for path in top.rglob("*") if top.is_dir() else [top]:
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        if path.is_file() and not path.is_symlink():
                            yield path.stat().st_mtime_ns, path

    def _send(self, loose: RemoteFolder, path: Path) -> None:
        # The state before it is read: what is appended meanwhile is sent the next time.
        name, status = path.relative_to(self.root).as_posix(), path.stat()
        version = status.st_size, status.st_mtime_ns
        if self._sent.get(name) == version:
            return
        if status.st_size <= _SMALL:
            loose.write(name, path.read_bytes())
        else:
            loose.put(path, name)
        self._sent[name] = version

    def fetch_loose(self, name: str, files: Files) -> None:
        """Download a file of the run, if it exists."""
        if self._loose is None or not self._loose.has(name):
            return
        with files.replacing(self.root / name) as new:
            files.write(new, self._loose.chunks(name))
