from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.failing_system import FailingSystem
from tests.checkpoint.faults import ShortFiles

from windlass.checkpoint.files import PIECE, FileEntry, Files, is_disk_failure, is_full_disk, is_unreachable
from windlass.core.errors import CheckpointError


@given(chunks=st.lists(st.binary(max_size=40), max_size=5))
def test_what_is_written_is_what_is_hashed_and_read(
    chunks: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = b"".join(chunks)
    for files in (Files(), ShortFiles()):
        path = folder / "file"
        path.unlink(missing_ok=True)
        entry = files.write(path, [memoryview(chunk) for chunk in chunks])
        assert entry == FileEntry(len(data), hashlib.sha256(data).hexdigest()) == files.digest(path)
        assert files.read(path, len(data)) == data


class Chatter(Files):
    """Operations in the order in which they come."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def before(self, operation: str, path: Path) -> None:
        self.said.append(operation)


def test_a_file_is_flushed_after_its_last_byte(tmp_path: Path) -> None:
    files = Chatter()
    files.write(tmp_path / "a", [b"x", b"y"])
    assert files.said == ["create", "write", "fsync"]


def test_what_is_flushed_reaches_the_system(tmp_path: Path) -> None:
    files, file = Files(), tmp_path / "a"
    with FailingSystem(tmp_path, "fsync", errno.EIO) as system:
        files.write(file, [b"x"])
        files.sync_file(file)
        files.sync_folder(tmp_path)
    assert system.count == 3
    for flush, path in ((files.sync_file, file), (files.sync_folder, tmp_path)):
        with FailingSystem(tmp_path, "fsync", errno.EIO, at=1), pytest.raises(OSError, match="Input/output"):
            flush(path)
    # Some network file systems cannot flush a folder.
    with FailingSystem(tmp_path, "fsync", errno.EINVAL, at=1):
        files.sync_folder(tmp_path)


class Noting(Files):
    """How long each piece is that the disk is offered, and whether it goes past the page cache; of a long one it takes
    at most `at_most` bytes.
    """

    def __init__(self, at_most: int = 1 << 30) -> None:
        self.pieces: list[tuple[int, bool]] = []
        self._at_most = at_most

    def write_some(self, descriptor: int, piece: memoryview) -> int:
        past = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        self.pieces.append((len(piece), past))
        return super().write_some(descriptor, piece[: self._at_most])


LARGE = [os.urandom(3), os.urandom(PIECE), os.urandom(PIECE + 5), b"", os.urandom(9)]
ALL = b"".join(LARGE)


@pytest.fixture
def disk() -> Iterator[Path]:
    """Where the system has its temporary files; `tmp_path` may lie in memory."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        yield Path(folder)


def goes_past_the_page_cache(folder: Path) -> bool:
    """Whether O_DIRECT does what it says: what fills no block is refused, which memory takes."""
    try:
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.write(descriptor, b"17 bytes of a row")
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no O_DIRECT")
def test_full_pieces_go_past_the_page_cache(disk: Path) -> None:
    if not goes_past_the_page_cache(disk):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    files = Noting()
    entry = files.write(disk / "large", LARGE)
    assert files.pieces == [(PIECE, True), (PIECE, True), (17, True), (17, False)]
    assert (disk / "large").read_bytes() == ALL
    assert entry == FileEntry(len(ALL), hashlib.sha256(ALL).hexdigest())
    small = Noting()
    small.write(disk / "small", [ALL[: PIECE - 1]])
    assert small.pieces == [(PIECE - 1, False)]


@pytest.mark.parametrize("at_most", [PIECE - 1, PIECE // 2, 4096 * 3 + 1])
def test_a_large_file_survives_short_writes(at_most: int, tmp_path: Path) -> None:
    """What follows a short write may lie on no block of the disk."""
    Noting(at_most).write(tmp_path / "large", LARGE)
    assert (tmp_path / "large").read_bytes() == ALL


def test_a_disk_that_refuses_pieces_after_all_gets_them_through_the_page_cache(tmp_path: Path) -> None:
    class Refusing(Noting):
        def write_some(self, descriptor: int, piece: memoryview) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().write_some(descriptor, piece)

    Refusing().write(tmp_path / "large", LARGE)
    assert (tmp_path / "large").read_bytes() == ALL


def test_another_refusal_of_the_disk_is_an_error(tmp_path: Path) -> None:
    class Refusing(Files):
        def write_some(self, descriptor: int, piece: memoryview) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    for name, chunks in (("small", [b"x"]), ("large", LARGE)):
        with pytest.raises(OSError, match="Invalid argument"):
            Refusing().write(tmp_path / name, chunks)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept")
    with pytest.raises(FileExistsError):
        Files().write(tmp_path / "a", [b"x"])
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Files().write(tmp_path / "link", [b"x"])
    assert (tmp_path / "a").read_text() == "kept"
    assert not (tmp_path / "elsewhere").exists()


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path) -> None:
    class Stuck(Files):
        def write_some(self, descriptor: int, piece: memoryview) -> int:
            return 0

    with pytest.raises(OSError, match="took no bytes"):
        Stuck().write(tmp_path / "a", [b"x"])


def test_a_leftover_under_the_temporary_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tmp-a").symlink_to(tmp_path / "nowhere")
    with Files().replacing(tmp_path / "a") as new:
        Files().write(new, [b"x"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"x"}


def test_a_file_system_without_a_size_is_not_taken_for_a_full_one(tmp_path: Path) -> None:
    assert Files().free_bytes(tmp_path) < 1 << 60
    assert Files().free_bytes(Path("/proc")) > 1 << 60


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(11))
    (tmp_path / "link").symlink_to(tmp_path / "large")
    # Laid out as the Hub's cache, with a link that leads out of it.
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").symlink_to(tmp_path / "large")
    (tmp_path / "snapshots" / "1" / "a").symlink_to("../../blobs/a")
    for name, why in [
        ("snapshots/1/a", "symbolic link"),
        ("absent", "is missing"),
        ("link", "symbolic link"),
        ("nul\0", "not a name of a file"),
        ("a" * 5000, "cannot be read|is missing"),
        (".", "not a plain file"),
        ("large", "11 bytes"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            Files().read(tmp_path / name, 10)
    if sys.platform == "linux":
        with pytest.raises(CheckpointError, match="grew"):
            # Its size is 0 and its content is not.
            Files().read(Path("/proc/self/status"), 10)


def test_too_many_open_files_are_refused_with_the_way_to_allow_more(tmp_path: Path) -> None:
    """As by a merge of the parts of a thousand ranks."""
    (tmp_path / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
    try:
        with (
            ExitStack() as opened,
            pytest.raises(CheckpointError, match=r"Too many open files; .* \(ulimit -n 65536\)"),
        ):
            # Whatever the process has open beside them.
            _ = [opened.enter_context(Files().reading(tmp_path / "file")) for _ in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("opens", [str, lambda path: path.open("wb")])
def test_what_torch_save_raises_for_a_file_that_the_disk_does_not_take(opens: Any, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.save(torch.zeros(1 << 16), opens(tmp_path / "model.pt"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_disk_failure(caught.value)


def test_which_errors_are_the_disks() -> None:
    assert is_disk_failure(OSError(errno.ENOSPC, "full"))
    assert is_disk_failure(Exception("Disk quota exceeded (os error 122)")) is (errno.EDQUOT == 122)
    assert is_disk_failure(PermissionError(errno.EACCES, "no"))
    assert not is_full_disk(PermissionError(errno.EACCES, "no"))
    assert is_full_disk(Exception("No space left on device (os error 28)"))
    assert not is_disk_failure(ValueError("28"))
    wrapped = CheckpointError("could not write")
    wrapped.__cause__ = OSError(errno.EIO, "broken")
    assert is_disk_failure(wrapped)
    assert is_unreachable(wrapped)
    assert not is_unreachable(PermissionError(errno.EACCES, "no"))
