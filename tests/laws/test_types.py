"""`from windlass import ...` gives type checkers and editors what the modules have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.laws.source import PACKAGE, ROOT, stubs

SCRIPT = """\
from windlass import Accelerator, SFTConfig, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from windlass import Trainr  # wrong
from windlass.training_args import TrainingArguments as Arguments
from windlass.utils import ProjectConfiguration, is_wandb_available, logging

args = TrainingArguments("out", learning_rate=1e-4)
TrainingArguments("out", learning_rte=1)  # wrong
TrainingArguments("out", learning_rate="1")  # wrong
SFTConfig("out", packin=True)  # wrong
Seq2SeqTrainingArguments("out", predict_with_generat=True)  # wrong
Arguments("out", learning_rte=1)  # wrong
Accelerator(mixed_precison="bf16")  # wrong
ProjectConfiguration(project_dirs="x")  # wrong
args.learning_rate.upper()  # wrong
args.learning_rte = 1e-4  # wrong
print(args.learning_rte)  # wrong
args.learning_rate = 1e-3
Trainer(args=args).train().global_step.upper()  # wrong
is_wandb_available().upper()  # wrong
logging.set_verbosity("info")  # wrong
logging.set_verbosity(20)
Trainer(args=args).evaluate()
"""
WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]


def _faults(folder: Path, *command: str) -> list[int]:
    (folder / "script.py").write_text(SCRIPT, "utf-8")
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-m", *command, "script.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = re.findall(r"script\.py:(\d+):.* error: ", done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines, done.stdout + done.stderr
    return sorted({int(line) for line in lines})


def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    cache = ROOT / ".mypy_cache" / "of_tests"
    command = ("mypy", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}")
    assert _faults(tmp_path, *command) == WRONG


def test_pyright(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    assert _faults(tmp_path, "pyright", "--pythonpath", sys.executable) == WRONG


def test_pyright_finds_every_name_of_the_stubs() -> None:
    pytest.importorskip("pyright")
    files = [str(stub.path) for stub in stubs()]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *files],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("TrainingArguments('out', learning_ra", "learning_rate="),
        ("SFTConfig('out', packing_s", "packing_strategy="),
        ("Accelerator(mixed_p", "mixed_precision="),
        ("args.learning_ra", "learning_rate"),
        ("Trainer().eval", "evaluate"),
        ("windlass.TrainingArg", "TrainingArguments"),
        ("from windlass.utils import ProjectC", "ProjectConfiguration"),
    ],
)
@pytest.mark.parametrize("live", [False, True], ids=["in an editor", "at a prompt"])
def test_completion(
    line: str,
    completed: str,
    live: bool,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jedi = pytest.importorskip("jedi")
    # A cache for this process: one that reads a file of the shared one while another writes it finds half a pickle.
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path_factory.getbasetemp() / "jedi"))
    begin = (
        "import windlass\nfrom windlass import Accelerator, SFTConfig, Trainer, TrainingArguments\n"
        "args = TrainingArguments('out')\n"
    )
    if live:
        names: dict[str, object] = {}
        exec(begin, names)
        found = jedi.Interpreter(line, [names]).complete()
    else:
        found = jedi.Script(begin + line).complete()
    assert completed in [completion.name for completion in found]
