"""What a process is doing, on its terminal and nowhere else."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
from tests.dist.launch import run_script
from tests.terminal import Terminal

from windlass.core.activity import Activity, Ticking

# Says what it does, in one of several ways; waits until the row was drawn with its seconds.
SCRIPT = """
import sys, threading, time
from windlass.core.activity import Activity, Opening
from windlass.core.terminal import foot_of

before = sys.stdout
with (Opening if "opening" in sys.argv else Activity)("reading the data"):
    if "silent" not in sys.argv:
        print("read")
    if "twice" in sys.argv:
        foot_of(sys.stdout).draw("bar", ["a bar"])
    while "opening" in sys.argv and "windlass-display" in [thread.name for thread in threading.enumerate()]:
        pass
    if "opening" in sys.argv:
        assert ("twice" in sys.argv) == (sys.stdout is not before)
    while "wait" in sys.argv and sys.stdin.readline() != "on\\n":
        pass
    if "fail" in sys.argv:
        raise RuntimeError("no data")
if "twice" in sys.argv:
    foot_of(sys.stdout).close("bar")
assert sys.stdout is before
print("done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "s.py").write_text(SCRIPT)
    return tmp_path / "s.py"


def test_a_row_with_seconds_that_leaves_nothing_behind(script: Path) -> None:
    with Terminal() as terminal:
        terminal.run(script, "wait")
        terminal.until("reading the data: 1 s")
        terminal.type("on\r")
        assert terminal.end() == 0, terminal.lines
        assert terminal.lines == ["read", "on", "done"]


def test_what_is_looked_for_on_the_hub_is_named(tmp_path: Path) -> None:
    lines = (
        "from windlass.core.activity import looking_for",
        "with looking_for(sys.argv[1]):",
        "    input()",
    )
    (tmp_path / "s.py").write_text("\n".join(("import sys", *lines)))
    with Terminal() as terminal:
        terminal.run(tmp_path / "s.py", "owner/model")
        terminal.until("looking for owner/model on the Hub")
        terminal.type("on\r")
        assert terminal.end() == 0, terminal.lines
    with Terminal() as terminal:
        terminal.run(tmp_path / "s.py", str(tmp_path))
        terminal.type("on\r")
        assert terminal.end() == 0, terminal.lines
        assert terminal.lines == ["on"]


def test_an_error_removes_the_row(script: Path) -> None:
    with Terminal() as terminal:
        terminal.run(script, "fail")
        assert terminal.end() == 1
        assert "reading the data" not in "".join(terminal.lines)
        assert terminal.lines[-1] == "RuntimeError: no data"


def test_a_bar_takes_its_place(script: Path) -> None:
    with Terminal() as terminal:
        terminal.run(script, "twice", "wait")
        terminal.until("a bar")
        terminal.until("read\n\na bar")  # alone, from the next second on
        terminal.type("on\r")
        assert terminal.end() == 0, terminal.lines
        assert terminal.lines == ["read", "on", "a bar", "done"]


@pytest.mark.parametrize("words", [[], ["twice"], ["twice", "silent"]])
def test_an_opening_ends_when_anything_else_is_shown(words: list[str], script: Path) -> None:
    with Terminal() as terminal:
        terminal.run(script, "opening", *words)
        assert terminal.end() == 0, terminal.lines
        assert b"reading" in terminal.raw
        expected = ["read" * ("silent" not in words), "a bar" * ("twice" in words), "done"]
        assert terminal.lines == [line for line in expected if line]


@pytest.mark.parametrize("environ", [{}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_nothing_in_a_pipe_or_of_other_ranks(environ: dict[str, str], script: Path) -> None:
    assert run_script(script, environ=environ) == "read\ndone\n"
    if environ:
        with Terminal() as terminal:
            terminal.run(script, environ=environ)
            assert terminal.end() == 0, terminal.lines
            assert b"reading" not in terminal.raw


def test_a_second_close_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    activity = Activity("working")
    activity.close()
    activity.close()
    assert sys.stdout is out
    assert "working" in out.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "windlass-display"]


def test_ticking_ends_when_it_is_told_to() -> None:
    ticked = threading.Event()

    def once() -> bool:
        ticked.set()
        return False

    ticking = Ticking(once)
    assert ticked.wait(60)
    ticking.stop()
    ticking.stop()
