"""Commands and scripts at a terminal of 80 columns, as a person types them: all end, and what they leave on the screen
is whole lines, with each bar once.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from tests import screens
from tests.cli.test_train import LM
from tests.dist.launch import end_of
from tests.terminal import CTRL_C, Terminal

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("terminal_runs.py")
WINDLASS = Path(sys.executable).with_name("windlass")
BAR = re.compile(r"^(train|evaluate) +\d+/\d+ +\d+% ")
ROW = re.compile(r"^ *(\d+) +\d+\.\d")  # a step and its loss


def bars(lines: list[str]) -> list[str]:
    """The rows of bars as `train 12/12`; fails if one of them is anything but a row of its own."""
    for line in lines:
        assert len(line) < 80 or not (ROW.match(line) or line.startswith(("step ", "train ", "evaluate "))), (
            line
        )
        drawn = re.findall(r"[━╸╺]{2,}|#{3,}|\.{4,}", line)
        assert not drawn or BAR.match(line), f"{line!r} in\n" + "\n".join(lines)
        assert not re.search(r".(train|evaluate) +\d+/\d+", line), line
    return [" ".join(line.split()[:2]) for line in lines if BAR.match(line)]


def words_of(command: str) -> list[str]:
    """The words that a shell would take of these rows."""
    return shlex.split(command.replace("\\\n", ""))


def typed(*words: str, cwd: Path, code: int = 0, **environ: str) -> list[str]:
    with Terminal() as terminal:
        terminal.run(RUNS, *words, cwd=cwd, environ=environ)
        assert terminal.end() == code, "\n".join(terminal.lines)
        return terminal.lines


@pytest.fixture
def room(tmp_path: Path) -> Path:
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = itertools.islice(re.findall(r"```python\n(.*?)```", text, re.DOTALL), 1)
    (tmp_path / "first.py").write_text(block)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not\n" * 60)
    (tmp_path / "lm.yaml").write_text(LM)
    return tmp_path


def test_a_run_with_evaluations_warnings_and_prints(tmp_path: Path) -> None:
    lines = typed("usual", cwd=tmp_path)
    assert bars(lines) == ["train 12/12", "evaluate 6/6"]
    assert "━" in "".join(lines)
    for whole in ("printed in words", "a library's record", "evaluated epoch", "ended at step 12"):
        assert lines.count(whole) == 1, whole
    assert "".join(lines).count("FutureWarning: something is deprecated") == 1
    assert [row[1] for line in lines if (row := ROW.match(line))] == ["3", "6", "9", "12"]
    assert [line.split() for line in lines if "saved" in line] == [
        ["saved", f"checkpoint-{step}"] for step in (4, 8, 12)
    ]
    assert [line.split()[:2] for line in lines if "eval_loss" in line] == [
        [s, "eval_loss"] for s in ("4", "8", "12")
    ]
    assert lines.index("ended at step 12") == len(lines) - 1


@pytest.mark.parametrize(
    ("what", "code", "last"),
    [("error", 1, "RuntimeError: the sixth update"), ("exit", 7, None), ("terminated", 75, None)],
)
def test_a_run_that_ends_early(what: str, code: int, last: str | None, tmp_path: Path) -> None:
    lines = typed(what, cwd=tmp_path, code=code)
    assert [bar.split("/")[1] for bar in bars(lines)] == ["12"]
    assert last is None or last in lines
    assert any("SIGTERM: finishing" in line for line in lines) == (what == "terminated")


def test_an_early_stop_and_evaluations_without_a_training(tmp_path: Path) -> None:
    lines = typed("early", cwd=tmp_path)
    assert bars(lines) == ["train 8/12", "evaluate 6/6"]
    assert "stopped at 8 of 12: eval_constant has not improved for 1 evaluation" in lines
    assert bars(typed("evaluate", cwd=tmp_path)) == ["evaluate 6/6", "evaluate 6/6"]


def test_ctrl_c_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    with Terminal() as terminal:
        terminal.run(RUNS, "endless", cwd=tmp_path)
        terminal.until("\n    50 ")
        terminal.resize(60, 20)
        terminal.until("\n   150 ")
        terminal.resize(100, 30)
        terminal.until("\n   200 ")
        terminal.type(CTRL_C)
        terminal.until("interrupted: finishing this update")
        assert terminal.end() == 0
        (ended,) = [line for line in terminal.lines if line.startswith("ended at step")]
    assert (tmp_path / "run" / f"checkpoint-{ended.split()[-1]}").is_dir()


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "40"}, {"LANG": "C"}])
def test_other_terminals(environ: dict[str, str], tmp_path: Path) -> None:
    with Terminal() as terminal:
        terminal.run(RUNS, "usual", cwd=tmp_path, environ=environ)
        assert terminal.end() == 0
        lines, raw = terminal.lines, terminal.raw
    assert lines[-1] == "ended at step 12"
    if environ == {"TERM": "dumb"}:
        assert b"\x1b" not in raw
    else:
        assert bars(lines) == ["train 12/12", "evaluate 6/6"]
        assert (b"\x1b[38" in raw or b"\x1b[3" in raw) == ("NO_COLOR" not in environ)
    if "COLUMNS" in environ:
        assert max(len(line) for line in lines if line.startswith(("step", "train", "evaluate"))) < 40


@pytest.mark.parametrize("columns", screens.COLUMNS)
@pytest.mark.parametrize("name", screens.SCREENS)
def test_what_a_person_sees(name: str, columns: int, tmp_path: Path) -> None:
    """`python -m tests.screens` writes the files again, and pictures of the screens into the documentation."""
    pytest.importorskip("transformers")
    screens.furnish(tmp_path)
    shown, _ = screens.shot(name, columns, tmp_path)
    assert screens.steady(shown) == (screens.TEXTS / f"{name}-{columns}.txt").read_text("utf-8")
    assert max(map(len, shown.partition("\n\n-----")[0].split("\n"))) <= columns


def test_without_a_bar(tmp_path: Path) -> None:
    lines = typed("plain", cwd=tmp_path)
    assert not bars(lines)
    assert lines.count("printed in words") == 1


@pytest.mark.dist
def test_two_ranks_share_a_terminal(tmp_path: Path) -> None:
    with Terminal() as terminal:
        terminal.run_ranks(2, RUNS, "usual", cwd=tmp_path)
        assert terminal.end() == 0, terminal.lines
        lines = terminal.lines
    assert bars(lines) == ["train 12/12", "evaluate 3/3"]
    for whole in ("printed in words", "ended at step 12"):
        assert lines.count(whole) == 2, lines
    assert "".join(lines).count("FutureWarning: something is deprecated") == 2


@pytest.mark.dist
def test_the_readme_s_script_as_typed_there(room: Path) -> None:
    """Interpreters of their own, under the launcher; then alone."""
    with Terminal() as terminal:
        terminal.start(WINDLASS, "launch", "--num_processes", "2", "first.py", cwd=room)
        assert terminal.end() == 0, terminal.lines
        assert bars(terminal.lines) == ["train 120/120", "evaluate 5/5"]
        assert b"starting first.py" in terminal.raw, "nothing is shown while torch is imported"
        assert "starting" not in "".join(terminal.lines)
    with Terminal() as terminal:
        terminal.run(room / "first.py", cwd=room)
        assert terminal.end() == 0, terminal.lines
        assert bars(terminal.lines) == ["train 120/120", "evaluate 10/10"]
        assert "".join(terminal.lines).count("{'eval_loss'") == 1


def test_a_recipe_is_dry_run_trained_interrupted_and_resumed(room: Path) -> None:
    with Terminal() as terminal:
        terminal.run("windlass", "train", "lm.yaml", "--dry-run", cwd=room)
        assert terminal.end() == 0, terminal.lines
        assert not bars(terminal.lines)
    with Terminal() as terminal:
        endless = ("training.max_steps=100000", "training.eval_strategy=no")
        terminal.run("windlass", "train", "lm.yaml", *endless, cwd=room)
        terminal.until("\n    20 ")
        terminal.type(CTRL_C)
        assert terminal.end() == 130, terminal.lines
        assert len(bars(terminal.lines)) == 1
        said = "\n".join(terminal.lines)
    state, _, command = said.partition("is complete. Resume with:")
    (step,) = re.findall(r"checkpoint-(\d+) $", state)
    assert "resume_from_checkpoint" not in said, "what a script would do"
    words = words_of(command)
    assert words[:4] == [sys.executable, "-m", "windlass", "train"]
    with Terminal() as terminal:
        steps = f"training.max_steps={int(step) + 2}"
        terminal.run("windlass", *words[3:], steps, cwd=room)
        assert terminal.end() == 0, terminal.lines
        assert bars(terminal.lines) == [f"train {int(step) + 2}/{int(step) + 2}", "evaluate 2/2"]
        printed = "\n".join(terminal.lines).partition("\nresume ")[2].partition("\n---")[0]
        assert words_of(printed) == [*words[:-1], steps, "--resume"]


def test_a_base_that_is_interrupted_is_continued_and_not_taken_for_complete(room: Path) -> None:
    pytest.importorskip("transformers")
    screens.furnish(room)
    # Some seconds of training: what is typed on a busy machine comes late.
    words = ["train", "sft-gsm8k", *screens.TUNING, "base.max_steps=1200", "training.max_steps=2"]
    with Terminal() as terminal:
        terminal.run("windlass", *words, cwd=room)
        terminal.until("\n  50 ")
        terminal.type(CTRL_C)
        assert terminal.end() == 130, terminal.lines
        said = "\n".join(terminal.lines)
    command = words_of(said.partition("Interrupted before the first checkpoint. Start again with:")[2])
    assert command == [sys.executable, "-m", "windlass", *words]
    base = room / "runs" / "sums" / "base"
    (saved,) = base.glob("checkpoint-*")
    with Terminal() as terminal:
        terminal.run("windlass", *words, cwd=room)
        assert terminal.end() == 0, terminal.lines
    record = json.loads((base / "run.json").read_text())
    assert [one["from_step"] for one in record["sessions"]] == [0, int(saved.name.split("-")[1])]
    assert not saved.exists()


@pytest.mark.slow
def test_windlass_run(room: Path) -> None:
    pytest.importorskip("transformers")
    script = (
        (room / "first.py").read_text("utf-8").replace("from windlass import", "from transformers import")
    )
    (room / "first.py").write_text(script)
    with Terminal() as terminal:
        terminal.run("windlass", "run", "first.py", cwd=room)
        assert terminal.end() == 0, terminal.lines
        assert bars(terminal.lines) == ["train 120/120", "evaluate 10/10"]


@pytest.mark.parametrize(
    "words",
    ["--help", "train --help", "launch --help", "config --help", "explain --help", "explain", "checkpoint ls .",
     "checkpoint --help", "train lm.yaml --print-config", "launch --num_processes 2 --print first.py"],
)  # fmt: skip
def test_what_commands_print_is_the_same_as_in_a_pipe(words: str, room: Path) -> None:
    code, piped = end_of("windlass", *words.split(), cwd=room, environ={"COLUMNS": "80"})
    with Terminal() as terminal:
        terminal.run("windlass", *words.split(), cwd=room)
        assert terminal.end() == code, terminal.lines
        seen = "".join(terminal.lines)
    assert "".join(seen.split()) == "".join(piped.split())
    assert seen


def test_questions_that_are_interrupted(room: Path) -> None:
    with Terminal() as terminal:
        terminal.run("windlass", "config", "--config_file", "mine.yaml", cwd=room)
        terminal.until("[ddp]:")
        terminal.type(CTRL_C)
        # Between a question and the read of its answer, Python notes the first one only with the next.
        again = threading.Timer(10.0, terminal.type, (CTRL_C,))
        again.start()
        assert terminal.end() == 130, terminal.lines
        again.cancel()
        assert "interrupted" in terminal.lines[-1]
    assert not (room / "mine.yaml").exists()


NOTEBOOK = """
import sys
sys.path.insert(0, {root!r})
from tests.cli import terminal_runs
from windlass import notebook_launcher

if __name__ == "__main__":
    notebook_launcher(terminal_runs.main, ("usual",), num_processes={count})
"""


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.dist])])
def test_a_function_that_is_launched(count: int, tmp_path: Path) -> None:
    (tmp_path / "launches.py").write_text(NOTEBOOK.format(root=str(ROOT), count=count))
    with Terminal() as terminal:
        terminal.run(tmp_path / "launches.py", cwd=tmp_path)
        assert terminal.end() == 0, terminal.lines
        assert bars(terminal.lines) == ["train 12/12", f"evaluate {6 // count}/{6 // count}"]
        assert terminal.lines.count("ended at step 12") == count
