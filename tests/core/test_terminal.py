from __future__ import annotations

import contextlib
import io
import multiprocessing.connection
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.terminal import Terminal
from tests.trainer.resume_cases import in_a_child

from windlass.core.terminal import Foot, can_redraw, folded_message, foot_of, write_at_once

# Writes in every way above a row; what it draws is "<n>", the number of the drawing.
WRITES = """
import logging, os, subprocess, sys, threading, warnings
kept = logging.StreamHandler(sys.stderr)  # made before there are rows: it writes past them
from windlass.core.output import say
from windlass.core.terminal import foot_of, write_at_once

before = sys.stdout, sys.stderr
foot = foot_of(sys.stdout)
foot.draw("a", ["<1>" * 20])
print("printed", "in", "words")
print("two\\nlines")
warnings.warn("warned")
say("said")
sys.stderr.writelines(["written ", "as lines\\n"])
kept.emit(logging.makeLogRecord({"msg": "past the rows"}))
foot.draw("a", ["<2>" * 20])
subprocess.run(["echo", "echoed"])
foot.draw("a", ["<3>" * 20])
write_at_once("at once")
threads = [threading.Thread(target=print, args=(f"thread {n}\\n" * 5,), kwargs={"end": ""}) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
other = foot_of(sys.stdout)
assert other is foot
other.draw("b", ["{row b}"])
pid = os.fork()
if not pid:
    print("forked")
    os._exit(0)
os.waitpid(pid, 0)
foot.draw("a", ["<4>" * 20])
print("the last")
foot.close("b")
foot.close("a")
foot.close("a")
assert (sys.stdout, sys.stderr) == before
print("after")
"""
SAW = """printed in words
two
lines
FILE:12: UserWarning: warned
  warnings.warn("warned")
said
written as lines
past the rows
echoed
at once
THREADS
forked
the last
{row b}
<4><4><4><4><4><4><4><4><4><4><4><4><4><4><4><4><4><4><4><4>
after"""

UNFINISHED = """
import sys, time
from windlass.core.terminal import foot_of

foot = foot_of(sys.stdout)
foot.draw("a", ["<1>"])
for _ in range(3):
    print(".", end="", flush=True)
    foot.draw("a", ["<2>"])
assert input("? ") == "yes"  # reads from the terminal
sys.stdout.write("\\rhalf"), sys.stdout.flush(), sys.stdout.write("\\rwhole\\n")
print("counted", end="\\r")
foot.say("said")
print("held", end="")
foot.close("a")
print(" and ended")
"""


def lines_of(script: str, tmp_path: Path, **size: int) -> list[str]:
    (tmp_path / "s.py").write_text(script)
    with Terminal(**size) as terminal:
        terminal.run(tmp_path / "s.py")
        assert terminal.end() == 0, terminal.lines
        return terminal.lines


@pytest.mark.parametrize("rows", [24, 4])
def test_what_others_write_is_above_the_rows(tmp_path: Path, rows: int) -> None:
    seen = "\n".join(lines_of(WRITES, tmp_path, rows=rows, columns=120)).replace(
        str(tmp_path / "s.py"), "FILE"
    )
    threads = [line for line in seen.split("\n") if line.startswith("thread ")]
    assert sorted(threads) == sorted(f"thread {n}" for n in range(4) for _ in range(5))
    assert seen.replace("\n".join(threads), "THREADS") == SAW


def test_a_line_without_its_end_has_the_screen_to_itself(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(UNFINISHED)
    with Terminal() as terminal:
        terminal.run(tmp_path / "s.py")
        terminal.until("...?")
        assert "<" not in "".join(terminal.lines)
        terminal.type("yes\r")
        assert terminal.end() == 0, terminal.lines
        assert terminal.lines == ["...? yes", "whole", "said", "<2>", "held and ended"]


def test_messages_are_folded_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "30")
    text = "1 problem:\n  - lr='a value': is not a number, write 1.0\n    as it  is"
    assert folded_message(text) == text
    screen.isatty = lambda: True  # type: ignore[method-assign]
    wanted = ["1 problem:", "  - lr='a value': is not a", "      number, write 1.0", "    as it  is"]
    assert folded_message(text).splitlines() == wanted


def test_a_terminal_that_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    assert not can_redraw(None)
    assert not can_redraw(closed)
    assert not can_redraw(io.StringIO())
    own, other = os.openpty()
    with open(other, "w", encoding="utf-8") as stream:
        monkeypatch.setenv("TERM", "xterm")
        assert can_redraw(stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not can_redraw(stream)
    os.close(own)


def test_only_streams_to_this_terminal_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`script.py 2> errors.txt` writes its errors there."""
    terminal, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    foot = foot_of(sys.stdout)
    assert isinstance(foot, Foot)
    foot.draw("a", ["row"])
    assert sys.stderr is errors
    assert sys.stdout is not terminal
    assert sys.stdout.encoding == terminal.encoding
    print("printed")
    foot.close("a")
    assert sys.stdout is terminal
    assert errors.getvalue() == ""


def test_what_a_script_put_in_place_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, own = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    foot = foot_of(sys.stdout)
    foot.draw("a", ["row"])
    kept = sys.stdout
    monkeypatch.setattr(sys, "stdout", own)
    foot.close("a")
    assert sys.stdout is own
    print("later", file=kept)
    kept.write("without an end")
    assert terminal.getvalue().endswith("row\nlater\nwithout an end")


class Stopped(io.StringIO):
    """A terminal on which Ctrl-C meets the writing of the last rows."""

    def write(self, text: str) -> int:
        if "the last" in text:
            raise KeyboardInterrupt
        return super().write(text)


def test_a_foot_that_is_stopped_while_it_closes_gives_the_streams_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Stopped()
    monkeypatch.setattr(sys, "stdout", terminal)
    foot = foot_of(sys.stdout)
    foot.draw("a", ["row"])
    with pytest.raises(KeyboardInterrupt):
        foot.draw("a", ["the last"])
    with pytest.raises(KeyboardInterrupt):
        foot.close("a")
    assert sys.stdout is terminal


def test_a_line_that_would_have_to_wait_is_left_out() -> None:
    """As that of a process that has to end by a deadline, where no process reads what it writes."""

    def work() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        read, write = os.pipe()
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(4096))
        os.set_blocking(write, True)
        os.dup2(write, 2)
        write_at_once("left out")
        while multiprocessing.connection.wait([read], 0):
            assert set(os.read(read, 1 << 16)) == {0}
        write_at_once("written")
        assert os.read(read, 100) == b"written\n"

    assert in_a_child(work) == 0
