from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.core.whole_file import open_new, remove_unfinished, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in ("first, and longer", "zweite Fassung: ü", b"\x00\xff"):
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert os.listdir(tmp_path) == ["a.json"]


def test_neither_a_device_nor_a_pipe_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        with pytest.raises(OSError, match="not a plain file"):
            write_whole(tmp_path / name, "new")
    assert sorted(os.listdir(tmp_path)) == ["null", "pipe"]


@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
def test_what_a_link_leads_to_stays_as_it_is(tmp_path: Path, leads: str) -> None:
    victim = tmp_path / "victim"
    if leads == "to a file":
        victim.write_text("precious")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.json").symlink_to(victim)
    write_whole(folder / "a.json", "new")
    assert (victim.read_text() if victim.exists() else "") == ("precious" if leads == "to a file" else "")
    assert (folder / "a.json").read_text() == "new"
    assert not (folder / "a.json").is_symlink()
    assert os.listdir(folder) == ["a.json"]
    with pytest.raises(FileExistsError):
        open_new(folder / "a.json")


def test_of_two_that_write_the_same_file_at_once_one_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of a script may write the same file: none fails, and none is seen half written."""
    path, fsync, seen = tmp_path / "a.json", os.fsync, []

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_whole(path, "the other")
        seen.append(path.read_text())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_whole(path, "this one")
    assert (seen, path.read_text()) == (["the other"], "this one")
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json"):
        write_whole(tmp_path / "a.json", "1")
    assert not os.listdir(tmp_path)


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["a.json", "tmp-a.json", "tmp-a.json-mine", "tmp-b.json-0123456789abcdef"]
    for name in ("tmp-a.json-0123456789abcdef", *kept):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path / "a.json")
    remove_unfinished(tmp_path / "folder" / "a.json")
    assert sorted(os.listdir(tmp_path)) == kept


FILLS = """
import resource, signal, sys
from pathlib import Path
from windlass.core.whole_file import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_whole(Path(sys.argv[1]), "x" * 10_000)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of a POSIX system")
def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    from tests.dist.launch import end_of

    script = tmp_path / "fills.py"
    script.write_text(FILLS)
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "a.json"
    path.write_text("earlier")
    code, said = end_of(script, path)
    assert code == 1
    assert "File too large" in said
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path / "out") == ["a.json"]
