"""Folders of files on their way to or from the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from windlass.core.errors import CheckpointError
from windlass.hub import staging
from windlass.hub.staging import STAGING, StagedFiles, remove_stale


def test_links_outlive_their_originals(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    staged = StagedFiles(tmp_path / "run")
    staged.link({"sub/w": tmp_path / "w"})
    (tmp_path / "w").unlink()
    assert (staged.path / "sub/w").read_bytes() == b"weights"
    staged.remove()
    assert list((tmp_path / "run" / STAGING).iterdir()) == []


def test_a_link_is_refused_and_its_target_not_staged(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("precious")
    (tmp_path / "w").symlink_to(tmp_path / "secret")
    staged = StagedFiles(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"w is a symbolic link"):
        staged.link({"w": tmp_path / "w"})
    assert list(staged.path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from windlass.hub.staging import StagedFiles
staged = StagedFiles(Path(sys.argv[1])).path
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_only_folders_of_killed_processes_are_stale(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    ours = StagedFiles(tmp_path)
    assert ours.path.is_dir()
    # Of a process that was killed before it locked the folder, and of one that is about to.
    early, now = (tmp_path / STAGING / name for name in ("new-1", "new-2"))
    early.mkdir()
    now.mkdir()
    os.utime(early, (0, 0))
    assert len(list((tmp_path / STAGING).iterdir())) == 4
    remove_stale(tmp_path)
    assert sorted((tmp_path / STAGING).iterdir()) == [now, ours.path]
    ours.remove()


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_a_folder_is_never_stale_while_it_is_made(tmp_path: Path) -> None:
    """Another publisher cleans up before each line."""
    lines = set[int]()

    def clean(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != staging.__file__:
            return None
        lines.add(frame.f_lineno)
        sys.settrace(None)
        remove_stale(tmp_path)
        sys.settrace(clean)
        return clean

    (tmp_path / "w").write_bytes(b"weights")
    staged = StagedFiles(tmp_path)
    sys.settrace(clean)
    try:
        staged.link({"sub/w": tmp_path / "w"})
    finally:
        sys.settrace(None)
    assert len(lines) > 10
    remove_stale(tmp_path)
    assert (staged.path / "sub/w").read_bytes() == b"weights"
    staged.remove()
    assert list((tmp_path / STAGING).iterdir()) == []
