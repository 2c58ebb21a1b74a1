"""Every file operation of checkpointing, in one small object.

Tests replace it to fail, to write short or to end the process at the n-th operation; nothing else in this
package changes the disk, but for the marks by which `nodes` finds out who shares one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from windlass.core.errors import CheckpointError
from windlass.core.whole_file import BINARY, NO_FOLLOW, open_new

if sys.platform == "linux":
    import fcntl

CHUNK = 1 << 24  # bytes that are read at a time
PIECE = 1 << 22  # bytes hashed and written at a time: large enough for the disk, small enough for the memory
_LARGEST_SMALL = 1 << 30  # bytes: no configuration or vocabulary is larger
_CHECKS = 10  # times that a file is hashed while it or its inode changes
_FULL_ERRNOS = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT") if hasattr(errno, name))
_SETTLED_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)
_AS_TEXT = re.compile(r"\(os error (\d+)\)|inline_container\.cc:\d+\] \. unexpected pos")


# Of an open file: inode, size, time of the last change to its content and to itself (ns). Changing a byte
# changes the last, which no program can set.
Fingerprint = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The entry of one file in a manifest: its size in bytes and its SHA-256 in lower-case hex."""

    size: int
    sha256: str


def is_disk_failure(error: BaseException | None) -> bool:
    """Return True if `error`, or what caused it, is an `OSError`, also of a library that turns it into text."""
    return _number_in(error) is not None


def is_full_disk(error: BaseException | None) -> bool:
    """Return True if the cause of `error` is a disk without room, or a used-up quota."""
    return _number_in(error) in _FULL_ERRNOS


def is_unreachable(error: BaseException | None) -> bool:
    """Return True if a file may exist that cannot be read now. A missing file, or one without permission, is not."""
    return _number_in(error) not in _SETTLED_ERRNOS


def _number_in(error: BaseException | None) -> int | None:
    """The system's number of an error, 0 if it gave none; None if the system has no part in it. Libraries written in
    Rust (safetensors, tokenizers) turn it into text: "... (os error 28)". `torch.save` notices that its file is short.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error.errno or 0
        if found := _AS_TEXT.search(str(error)):
            return int(found[1] or 0)
        error = error.__cause__
    return None


class Files:
    """The disk. Raises `OSError` as the system gives it; reading raises `CheckpointError` for what is not a
    plain file.
    """

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that changes the disk: the seam where tests put faults."""

    # --- writing

    def ensure_folder(self, path: Path) -> None:
        if not path.is_dir():
            self.before("ensure_folder", path)
            path.mkdir(parents=True, exist_ok=True)

    def make_folder(self, path: Path) -> None:
        """Make a folder that must not exist yet."""
        self.before("make_folder", path)
        path.mkdir()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write a new file and fsync it. The hash is taken from the bytes as they pass.

        What fills whole pieces goes past the page cache where the file system can do that: a checkpoint is hardly
        read again, and copying it there takes more of the processor than hashing it, and the place of data that is.
        """
        self.before("create", path)
        descriptor = open_new(path)
        digest, size = hashlib.sha256(), 0
        try:
            for piece in _pieces(chunks):
                self.before("write", path)
                digest.update(piece)
                if size == 0 and len(piece) == PIECE:
                    _use_page_cache(descriptor, False)
                self._write_all(descriptor, piece)
                size += len(piece)
            self.before("fsync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return FileEntry(size, digest.hexdigest())

    def _write_all(self, descriptor: int, piece: memoryview) -> None:
        while len(piece):
            try:
                written = self.write_some(descriptor, piece)
            except OSError as error:
                # Only whole blocks of the disk go past the page cache: neither a file's end nor what follows a short
                # write does.
                if error.errno != errno.EINVAL or not _use_page_cache(descriptor, True):
                    raise
                continue
            if written <= 0:
                raise OSError(errno.EIO, "the disk took no bytes and gave no reason")
            piece = piece[written:]

    def write_some(self, descriptor: int, piece: memoryview) -> int:
        """One system call; it may take fewer bytes than offered."""
        return os.write(descriptor, piece)

    def sync_file(self, path: Path) -> None:
        """fsync a file that other code wrote."""
        self.before("fsync", path)
        # Windows refuses to flush a descriptor opened for reading only.
        mode = os.O_RDWR if os.name == "nt" else os.O_RDONLY
        descriptor = os.open(path, mode | NO_FOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make names in `path` durable: without it a power cut may undo a rename that was seen to work."""
        self.before("fsync_folder", path)
        if os.name == "nt":
            return  # no handle to a folder there
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no fsync for folders: their renames are durable or nothing can be
            # done.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source)
        os.replace(source, target)

    @contextlib.contextmanager
    def replacing(self, path: Path, suffix: str = "") -> Iterator[Path]:
        """A temporary name, which is renamed to `path` after the body, or removed after an error: the old file exists
        until the new one is complete. A leftover of an interrupted process is removed before. `suffix`: of the
        temporary name, where several processes may write the file at once.
        """
        new = path.with_name("tmp-" + path.name + suffix)
        # Not `exists`, which is False for a link that leads nowhere.
        if os.path.lexists(new):
            self.remove_file(new)
        try:
            yield new
            self.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove_file(new)
            raise

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, which must not exist yet."""
        self.before("link", target)
        os.link(source, target)

    def remove_file(self, path: Path) -> None:
        self.before("remove", path)
        os.unlink(path)

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder and all in it; a symbolic link is removed, never followed."""
        if folder.is_symlink():
            self.remove_file(folder)
            return
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self.before("remove_folder", folder)
        os.rmdir(folder)

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written under `path`, as far as is known: some file systems, as of remote storage,
        have no size.
        """
        usage = shutil.disk_usage(path)
        return usage.free if usage.total else sys.maxsize

    # --- reading

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[FileIO]:
        """Open a plain file: no pipe, no device, and no symbolic link but those of the Hub's cache. Raises
        CheckpointError if it is missing or not a plain file, or if no file can have this name.
        """
        try:
            path = _blob_of(path) or path
            # O_NONBLOCK: to open a pipe would otherwise wait for a process that writes to it.
            descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | BINARY | getattr(os, "O_NONBLOCK", 0))
        except ValueError as error:  # a NUL, or half of a pair of surrogates
            raise CheckpointError(f"{str(path)!a} cannot be read: it is not a name of a file") from error
        except OSError as error:
            if os.path.islink(path):
                raise CheckpointError(
                    f"{path} is a symbolic link; a checkpoint holds plain files only"
                ) from error
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                raise CheckpointError(f"{path} is missing") from error
            fix = "; let a process open more (ulimit -n 65536)" if error.errno == errno.EMFILE else ""
            raise CheckpointError(f"{path} cannot be read: {error.strerror}{fix}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path} is not a plain file")
        with FileIO(descriptor, "rb") as file:
            yield file

    def read(self, path: Path, limit: int) -> bytes:
        """A file of at most `limit` bytes. Raises CheckpointError if it is missing, not a plain file, or larger."""
        with self.reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} has {size:,} bytes; at most {limit:,} are read of such a file")
            data = bytearray()
            while len(data) <= limit and (piece := file.read(CHUNK)):
                data += piece
        if len(data) > limit:
            raise CheckpointError(f"{path} grew while it was read")
        return bytes(data)

    def digest(self, path: Path) -> FileEntry:
        """Size and SHA-256 of a plain file, in constant memory."""
        with self.reading(path) as file:
            return digest_of(file)

    def check(self, path: Path, entry: FileEntry) -> Fingerprint:
        """Compare the content of a plain file with what it must be; return its state on the disk. Raises
        CheckpointError if it differs.
        """
        with self.reading(path) as file:
            for _ in range(_CHECKS):
                before = fingerprint(file)
                file.seek(0)
                if digest_of(file) != entry:
                    raise CheckpointError(
                        f"{path} is damaged: its content does not match the manifest's hash"
                    )
                # The inode alone changes when a run that goes on links the file into its next checkpoint.
                if fingerprint(file) == before:
                    return before
            raise CheckpointError(f"{path} changed while it was checked")


def _blob_of(path: Path) -> Path | None:
    """The file that a link in the Hub's cache leads to; None for any other path. A repository lies there as files in
    `blobs`, and `snapshots` has a folder for each revision, whose names are links to them.
    """
    if not os.path.islink(path):
        return None
    blob, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    is_cached = blob.parent.name == "blobs" and blob.parent.with_name("snapshots") in folder.parents
    return blob if is_cached else None


def fingerprint(file: FileIO) -> Fingerprint:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest_of(file: FileIO) -> FileEntry:
    """Size and SHA-256 of the rest of an open file, in constant memory."""
    digest = hashlib.file_digest(file, "sha256")
    return FileEntry(file.tell(), digest.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces that are full but for the last, each to be used before the next is asked for."""
    # A disk that reads memory by itself wants it to begin at the edge of a page, and to be shared (as mmap's is) with
    # processes that are forked meanwhile: of other memory they might get the page that the disk reads (open(2), NOTES).
    buffer, filled = memoryview(mmap.mmap(-1, PIECE)), 0
    for chunk in chunks:
        # Python refuses to cast a view without elements.
        view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
        while len(view):
            fits = view[: PIECE - filled]
            buffer[filled : filled + len(fits)] = fits
            view, filled = view[len(fits) :], filled + len(fits)
            if filled == PIECE:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _use_page_cache(descriptor: int, wanted: bool) -> bool:
    """Whether writes go through the page cache from now on as is wanted and did not before; only Linux has the choice,
    and not for every file system.
    """
    if sys.platform != "linux":
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if wanted != bool(flags & os.O_DIRECT):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True


def written_by(save: Callable[[Path], None]) -> dict[str, bytes]:
    """The small files (configurations, vocabularies) that `save` writes into a folder, by relative name."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as name:
        folder, files = Path(name), Files()
        save(folder)
        return {
            path.relative_to(folder).as_posix(): files.read(path, _LARGEST_SMALL)
            for path in sorted(folder.rglob("*"))
            if not path.is_dir()
        }
