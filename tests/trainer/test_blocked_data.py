"""Data that stop coming: Ctrl-C ends every wait for them, and what was trained is saved."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.terminal import CTRL_C, Terminal

SCRIPT = Path(__file__).with_name("blocked_data.py")


def stopped(kind: str, folder: Path, step: int = 0, number: int = signal.SIGINT) -> tuple[int, str]:
    """Exit code and screen of a run that gets a signal while nothing comes after this step: a worker reads ahead."""
    with Terminal() as terminal:
        terminal.run(SCRIPT, kind, cwd=folder)
        terminal.until("nothing comes")
        if step:
            terminal.until(f"\n   {step} ")
        if number == signal.SIGINT:
            terminal.type(CTRL_C)
        else:
            terminal.send_signal(number)
        return terminal.end(), "\n".join(terminal.lines)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("workers", 2),
        ("persistent workers", 2),
        ("stream with workers", 1),
        ("alone", 2),
        ("stream alone", 1),
        ("evaluation", 2),
        ("evaluation alone", 2),
        ("first evaluation", 0),
    ],
)
def test_a_training_is_saved_and_goes_on(kind: str, step: int, tmp_path: Path) -> None:
    code, said = stopped(kind, tmp_path, step)
    assert code == 0, said
    assert "interrupted: finishing this update" in said.replace("\n", "")
    assert f"ended at step {step}, evaluated at []" in said
    assert (tmp_path / "run" / f"checkpoint-{step}").is_dir()
    with Terminal() as terminal:
        terminal.run(SCRIPT, kind, "whole", cwd=tmp_path)
        assert terminal.end() == 0, terminal.lines
        evaluated = {"first evaluation": [0, 2, 4]}.get(kind, [2, 4] if "evaluation" in kind else [])
        assert terminal.lines[-1] == f"ended at step 4, evaluated at {evaluated}"


@pytest.mark.parametrize("kind", ["evaluate", "loop"])
def test_outside_a_training_it_is_an_interrupt(kind: str, tmp_path: Path) -> None:
    code, said = stopped(kind, tmp_path)
    assert code == 1
    assert re.search("^KeyboardInterrupt", said, re.MULTILINE)


@pytest.mark.parametrize("kind", ["workers", "evaluation"])
def test_a_scheduler_s_signal_ends_the_wait_too(kind: str, tmp_path: Path) -> None:
    code, said = stopped(kind, tmp_path, 2, signal.SIGTERM)
    assert code == 75, said
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
