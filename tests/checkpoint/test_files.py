from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.faults import ShortFiles

from windlass.checkpoint.files import FileEntry, Files, is_disk_failure
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
    assert files.said == ["create", "write", "write", "fsync"]


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


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(11))
    (tmp_path / "link").symlink_to(tmp_path / "large")
    for name, why in [
        ("absent", "is missing"),
        ("link", "symbolic link"),
        (".", "not a plain file"),
        ("large", "11 bytes"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            Files().read(tmp_path / name, 10)


def test_which_errors_are_the_disks() -> None:
    assert is_disk_failure(OSError(errno.ENOSPC, "full"))
    assert is_disk_failure(Exception("Disk quota exceeded (os error 122)")) is (errno.EDQUOT == 122)
    assert not is_disk_failure(PermissionError(errno.EACCES, "no"))
    assert not is_disk_failure(ValueError("28"))
    wrapped = CheckpointError("could not write")
    wrapped.__cause__ = OSError(errno.EIO, "broken")
    assert is_disk_failure(wrapped)
