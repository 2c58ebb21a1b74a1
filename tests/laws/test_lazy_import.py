"""`import windlass` costs next to nothing, `TrainingArguments` costs no torch, `Trainer` costs torch and no more."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

HEAVY = [
    "torch", "numpy", "safetensors", "transformers", "datasets", "tokenizers", "accelerate", "huggingface_hub", "rich",
    "matplotlib", "pandas", "pyarrow", "yaml", "tqdm", "requests", "sklearn", "scipy", "PIL", "tensorboard", "wandb",
]  # fmt: skip
NO_TORCH = [name for name in HEAVY if name != "yaml"]
OPTIONAL = [name for name in HEAVY if name not in ("torch", "numpy", "safetensors", "yaml")]


@functools.cache
def _imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import windlass", HEAVY),
        ("import windlass; dir(windlass); windlass.__version__", HEAVY),
        ("from windlass import TrainingArguments", NO_TORCH),
        ("from windlass import TrainingArguments as A; A('out', max_steps=3)", NO_TORCH),
        ("from windlass import Trainer, TrainingArguments", OPTIONAL),
    ],
    ids=["package", "directory", "arguments", "arguments made", "trainer"],
)  # fmt: skip
def test_import_leaves_out(statement: str, forbidden: list[str]) -> None:
    # torch itself may bring some of them along where they are installed; those are not ours to answer for.
    brought = _imported_by("import torch") if "torch" not in forbidden else set()
    assert not (_imported_by(statement) & set(forbidden)) - brought


def test_the_check_sees_an_import() -> None:
    assert "torch" in _imported_by("import torch")
