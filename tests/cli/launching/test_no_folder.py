"""What the launcher does when the folder of its files is gone, and when an exception cannot be written as text."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.dist.launch import end_of

from windlass.cli.launching.failure_report import say

# Fails in the first attempt as its arguments say; the second ends well.
FAILS = """
import os, pathlib, shutil, sys, tempfile
from windlass.dist.beacon import beacon
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
rank = os.environ["RANK"]
beacon().call("data", 7)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == "1":
    for what in sys.argv[1:]:
        if what == "remove":
            for folder in pathlib.Path(tempfile.gettempdir()).iterdir():
                shutil.rmtree(folder)
        if what == "block":  # nothing can be made in a path that is a file
            for folder in pathlib.Path(tempfile.gettempdir()).iterdir():
                shutil.rmtree(folder)
                folder.touch()
        if what == "surrogates":
            raise ValueError("row \\udcff of caf\\u00e9")
        if what == "mute":
            raise Mute
        if what == "killed":
            os.kill(os.getpid(), 9)
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {rank} ended", flush=True)
"""


def launched(tmp_path: Path, *words: str) -> tuple[int, str]:
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(FAILS)
    temporary.mkdir()
    command = ("launch", "--cpu", "--num_processes", 2, "--max_restarts", 1, script, *words)
    environ = {"WINDLASS_HOME": "/nowhere", "TMPDIR": str(temporary)}
    return end_of("windlass", *command, timeout=120, environ=environ)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("words", "report"),
    [
        (("remove", "surrogates"), "rank 1 raised ValueError: row \\udcff of café [step 7, in 'data']"),
        pytest.param(("remove", "killed"), "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        (("block", "killed"), "rank 1 was killed by SIGKILL (often the machine ran out of memory) [step 7"),
        pytest.param(("mute",), "rank 1 raised Mute: (its message cannot be shown)", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_reported_and_the_job_restarted(
    tmp_path: Path, words: tuple[str, ...], report: str
) -> None:
    code, said = launched(tmp_path, *words)
    assert code == 0, said
    assert f"the job failed: {report}" in said
    assert "restart 1 of 1" in said
    assert [f"attempt 1 of rank {rank} ended" in said for rank in range(2)] == [True, True]


@pytest.mark.dist
def test_a_job_that_ended_well_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    code, said = launched(tmp_path)
    assert code == 0, said
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    shutil.copyfile(__file__, tmp_path / "script.py")
    (tmp_path / "file").touch()
    command = ("launch", "--cpu", "--log_dir", tmp_path / "file", tmp_path / "script.py")
    code, said = end_of("windlass", *command, timeout=120, environ={"WINDLASS_HOME": "/nowhere"})
    assert code == 2
    assert f"--log_dir='{tmp_path / 'file'}': cannot hold the files of the processes" in said


def test_a_console_that_is_gone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(write, "w"), write_through=True))
    say("caf\udcff")
