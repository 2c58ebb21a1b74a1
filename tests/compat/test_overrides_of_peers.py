"""What the trainers of libraries for transformers override: read from their source, which takes no time to import."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from windlass import TrainingArguments
from windlass.trainer.uncalled import NEVER_CALLED, OF_ACCELERATOR, OF_ARGUMENTS, idle

TRAINERS = {"sentence_transformers": "*/trainer.py", "setfit": "*.py", "trl": "trainer/*_trainer.py"}


def overridden(file: Path) -> set[str]:
    """The methods of the classes in a file that derive from a trainer."""
    classes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return {
        method.name
        for kind in classes
        if any(ast.unparse(base).endswith("Trainer") for base in kind.bases)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_no_trainer_is_refused_for_what_it_overrides(name: str, tmp_path: Path) -> None:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    files = sorted(Path(spec.origin).parent.glob(TRAINERS[name]))
    found = set().union(*map(overridden, files))
    assert found, "the files are those of its trainers"
    known = NEVER_CALLED.keys() | OF_ACCELERATOR.keys() | OF_ARGUMENTS.keys()
    assert not found & known - idle(TrainingArguments(str(tmp_path)), divides_sequences=False)
