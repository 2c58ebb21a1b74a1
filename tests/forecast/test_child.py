"""Work in a forked process that is not wanted any more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Any

from tests.dist.garbage import collect_among_threads, leave_a_store_behind
from tests.trainer.resume_cases import in_a_child

from windlass.core.errors import ConfigError, Problem
from windlass.forecast.child import Child, apart


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def test_code_that_waits_for_an_answer_runs_in_no_other_process(tmp_path: Path) -> None:
    """Ctrl-C ends the wait, and the answer of the other process is read by no process."""
    ended = tmp_path / "ended"
    wait, held = os.pipe()
    runs, alive = os.pipe()

    def answer() -> None:
        os.close(held)
        os.read(wait, 1)  # until the process that asked has ended

    def work() -> None:
        signal.signal(signal.SIGALRM, interrupt)
        try:
            with Child(answer) as child:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                child.result()
        except KeyboardInterrupt:
            with ended.open("a") as file:
                file.write("interrupted\n")
        except OSError:
            with ended.open("a") as file:
                file.write("not read\n")

    assert in_a_child(work) == 0
    os.close(held)
    os.close(alive)
    assert os.read(runs, 1) == b""  # the other process has ended
    assert ended.read_text() == "interrupted\n"


def test_it_ends_with_the_process_that_waits_for_it() -> None:
    runs, alive = os.pipe()
    wait, held = os.pipe()

    def killed() -> None:
        os.close(held)
        os.kill(os.getppid(), signal.SIGKILL)
        os.read(wait, 1)  # until the test closes the other end

    assert in_a_child(lambda: apart(killed)) == -signal.SIGKILL
    os.close(alive)
    ready, _, _ = select.select([runs], [], [], 20)
    os.close(held)
    assert ready, "the other process ran on"


def test_it_does_not_collect_what_was_garbage_before_it() -> None:
    def work() -> None:
        leave_a_store_behind()
        apart(collect_among_threads)

    assert in_a_child(work) == 0


def test_none_is_left_if_another_one_raises() -> None:
    """Its answer is longer than a pipe holds, so that it would wait for a reader."""

    def refuse() -> None:
        raise ConfigError(Problem("layers", 2, "are too few"))

    def work() -> None:
        with (
            contextlib.suppress(ConfigError),
            Child(refuse) as one,
            Child(lambda: "long" * 100_000) as other,
        ):
            one.result()
            other.result()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        raise AssertionError("a process is left")

    assert in_a_child(work) == 0
