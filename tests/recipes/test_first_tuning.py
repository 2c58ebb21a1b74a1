"""The fine-tuning of the README, as printed there: what `windlass train` made learns to answer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import run_script

pytest.importorskip("transformers")
pytest.importorskip("datasets")

ROOT = Path(__file__).parents[2]
SHORT = {
    "windlass train ": [
        "training.max_steps=4",
        "training.save_steps=4",
        "model.config.num_hidden_layers=1",
    ],
    "windlass train first-tuning": [
        "model=runs/python-docs/checkpoint-4",
        "training.max_steps=2",
        "training.save_steps=2",
    ],
}


def commands() -> list[str]:
    """The commands of the section, without the comments."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## Fine-tuning\n")[2]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[:1]
    return [re.split(r"  +#", line)[0] for line in block.splitlines()]


def run(folder: Path, *, short: bool) -> list[str]:
    """Run the commands in `folder`, and return what each of them printed."""
    said = []
    install, data, *rest = commands()
    assert install.startswith("pip install ")
    program = re.fullmatch(r"python -c '(.*)' > sums.jsonl", data)
    assert program is not None
    made = subprocess.run([sys.executable, "-c", program[1]], capture_output=True, text=True, check=True)
    (folder / "sums.jsonl").write_text(made.stdout)
    for command in rest:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)][1:]
        extra = SHORT["windlass train first-tuning" if "first-tuning" in command else "windlass train "]
        changes = [*extra, "training.use_cpu=true"] if short and words[0] == "train" else []
        said.append(run_script("windlass", *words, *changes, cwd=folder, timeout=800))
    return said


def test_the_commands_in_short(tmp_path: Path) -> None:
    _, tuned, generated = run(tmp_path, short=True)
    assert "Before training, the model writes: 237 plus 1 =" in tuned
    assert re.search(r"\nafter +237 plus 1 =", tuned)
    assert "runs/first-tuning/checkpoint-2:" in generated


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_model_answers_a_question_that_it_was_not_trained_on(tmp_path: Path) -> None:
    _, tuned, generated = run(tmp_path, short=False)
    assert re.search(r"\nbefore +237 plus 1 =(?! 238)", tuned)
    assert re.search(r"\nafter +237 plus 1 = 238\n", tuned)
    assert generated.endswith(" 238\n")
