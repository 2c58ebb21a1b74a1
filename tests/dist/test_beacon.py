from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.dist.beacon import (
    FOLDER_VARIABLE,
    STACKS_SIGNAL,
    Beacon,
    LitBeacon,
    Lookout,
    Mark,
    light,
    mark_path,
    stacks_path,
)


@pytest.fixture
def lit(tmp_path: Path) -> LitBeacon:
    return LitBeacon(mark_path(tmp_path, 3))


def test_a_new_beacon_says_that_its_process_has_started(lit: LitBeacon, tmp_path: Path) -> None:
    assert Lookout(tmp_path, 3).mark() == Mark(1, None, "start")
    assert Lookout(tmp_path, 3).mark().is_opening


def test_a_mark_tells_step_and_call(lit: LitBeacon, tmp_path: Path) -> None:
    lit.call("update", 7)
    lit.call("backward")
    mark = Lookout(tmp_path, 3).mark()
    assert mark == Mark(3, 7, "backward")
    assert not mark.is_opening


def test_a_shorter_name_leaves_nothing_of_the_longer_one(lit: LitBeacon, tmp_path: Path) -> None:
    lit.call("gather objects")
    lit.call("save")
    assert Lookout(tmp_path, 3).mark().call == "save"


def test_the_place_of_a_rank_is_left_for_the_launcher(lit: LitBeacon, tmp_path: Path) -> None:
    waiting = Lookout(tmp_path, 3, make=True)
    assert waiting.place() == ""
    lit.place("context 1, tensor 0")
    mark_path(tmp_path, 3).with_suffix(".place").rename(tmp_path / "moved")  # the folder was removed
    assert waiting.place() == "context 1, tensor 0"


def test_long_names_are_cut_and_stay_readable(lit: LitBeacon, tmp_path: Path) -> None:
    lit.call("x" + "ü" * 40)  # the cut falls within a letter
    assert Lookout(tmp_path, 3).mark().call == "x" + "ü" * 31 + "�"


def test_a_mark_that_is_not_there_or_not_whole_is_none(tmp_path: Path) -> None:
    assert Lookout(tmp_path, 0).mark() is None
    mark_path(tmp_path, 0).write_bytes(b"short")
    assert Lookout(tmp_path, 0).mark() is None


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {FOLDER_VARIABLE: "/nowhere/at/all", "RANK": "0"}])
def test_without_a_launcher_that_asks_marks_go_nowhere(environ: dict[str, str]) -> None:
    dark = light(environ)
    assert type(dark) is Beacon
    dark.call("forward", 1)


ASKED = f"""
import os, sys
from windlass.dist.beacon import beacon
beacon().call("evaluate")
def deep_in_the_script():
    os.kill(os.getpid(), {int(STACKS_SIGNAL)})
deep_in_the_script()
assert beacon() is beacon()
assert "torch" not in sys.modules
print("still here")
"""


def test_a_process_writes_its_stacks_when_asked_and_goes_on(tmp_path: Path) -> None:
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path), "RANK": "2"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "still here\n"
    assert "deep_in_the_script" in stacks_path(tmp_path, 2).read_text()
    assert Lookout(tmp_path, 2).mark() == Mark(2, None, "evaluate")


def test_a_process_that_comes_down_is_not_killed_by_the_question_for_its_stacks(tmp_path: Path) -> None:
    program = (
        "import os, faulthandler; from windlass.dist.beacon import beacon, STACKS_SIGNAL; beacon(); "
        "faulthandler.unregister(STACKS_SIGNAL); os.kill(os.getpid(), STACKS_SIGNAL); print('ended itself')"
    )
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended itself\n"), done.stderr
