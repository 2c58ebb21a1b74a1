from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT, end_of
from tests.terminal import Terminal

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.tracebacks import install, printed

SCRIPT = """\
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from tests.trainer.small import Net, arguments, rows
from windlass import Trainer, TrainerCallback


class Own(TrainerCallback):
    def on_step_end(self, args, state, control, **of_run):
        {fault}


Trainer(Net(), arguments(Path("run")), train_dataset=rows(16), callbacks=[Own()]).train()
"""
OWN, WITHIN = "raise KeyError('mine')", "import torch; torch.nn.Linear(2, 2)(torch.ones(3))"


def fail(error: Exception, cause: Exception | None = None) -> str:
    """What is printed for an error that this file raises."""
    try:
        raise error from cause
    except Exception as raised:
        return printed(raised)


def test_an_error_of_windlass_has_the_calls_of_its_user() -> None:
    lines = fail(DataError("row 3 is empty")).splitlines()
    assert lines == [
        "Traceback (WINDLASS_TRACEBACK=full shows all frames):",
        lines[1],
        "    raise error from cause",
        "windlass.core.errors.DataError: row 3 is empty",
    ]
    assert fail(DataError("row 3 is empty"), IndexError("5\nof 4")).splitlines()[-1] == (
        "It came from IndexError: 5"
    )


def test_a_long_message_leaves_room_for_one_call() -> None:
    problems = [Problem(f"field{number}", number, "no such field") for number in range(7)]
    assert len(fail(ConfigError(problems)).splitlines()) == 10
    assert fail(ConfigError(problems + problems)).splitlines()[1] == "    raise error from cause"


def test_ctrl_c_has_the_calls_only() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([signal.SIGUSR2], 60)
    except KeyboardInterrupt as interrupted:
        said = printed(interrupted)
    assert said.splitlines()[0] == "Traceback (WINDLASS_TRACEBACK=full shows all frames):"
    assert said.splitlines()[-1] == "KeyboardInterrupt"


def test_ctrl_c_while_an_object_is_destroyed_is_not_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n\n\nclass Held:\n    def __del__(self):\n        signal.raise_signal(signal.SIGINT)\n\n\n"
        "Held()\nwhile True:\n    pass\n"
    )
    code, said = end_of(script, timeout=60)
    assert code == 1
    assert said.endswith("KeyboardInterrupt\n")
    assert "ignored" not in said


def test_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_TRACEBACK", "full")
    assert fail(DataError("empty"), IndexError("5")).count("Traceback (most recent call last)") == 1
    assert "direct cause" in fail(DataError("empty"), IndexError("5"))


def test_a_program_with_a_hook_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", own := lambda *error: None)
    install()
    assert sys.excepthook is own


@pytest.mark.parametrize(
    ("fault", "frames", "last"),
    [(OWN, 2, "KeyError: 'mine'"), (WITHIN, 3, "RuntimeError: mat1 and mat2")],
    ids=["own", "below it"],
)
def test_an_error_in_what_a_script_defines(fault: str, frames: int, last: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), fault=fault))
    with Terminal(columns=200) as terminal:
        terminal.run(tmp_path / "script.py", cwd=tmp_path)
        assert terminal.end() == 1
        lines = terminal.lines
    shown = lines[lines.index("Traceback (WINDLASS_TRACEBACK=full shows all frames):") :]
    assert sum(line.startswith('  File "') for line in shown) == frames
    assert sum("script.py" in line for line in shown) == 2
    assert any(line.startswith(last) for line in shown)
    assert len(shown) <= 10
