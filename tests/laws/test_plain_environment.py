"""Training a plain nn.Module needs torch, numpy, safetensors and PyYAML, and nothing else that is installed here."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CORE = ("torch", "numpy", "safetensors", "PyYAML")

PROGRAM = '''
import importlib.machinery, json, sys
absent = set(json.loads(sys.argv[1]))

class Plain(importlib.machinery.PathFinder):
    """Finds what a bare installation has: an absent package is simply not found, as it would be there."""
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path = [Plain if f is importlib.machinery.PathFinder else f for f in sys.meta_path]

import torch
from torch import nn
from windlass import EarlyStoppingCallback, Trainer, TrainingArguments

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}

torch.manual_seed(0)
xs = torch.randn(64, 4)
data = [{"x": x, "labels": int(x.sum() > 0)} for x in xs]
args = TrainingArguments(
    sys.argv[2], num_train_epochs=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
    eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, load_best_model_at_end=True, logging_steps=10,
    use_cpu=True,
)
accuracy = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
trainer = Trainer(
    Classifier(), args, train_dataset=data, eval_dataset=data[:16], compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=20)],
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
metrics = trainer.evaluate()
predicted = trainer.predict(data[:5]).predictions.shape
assert predicted == (5, 2), predicted
assert metrics["eval_loss"] < 0.7 * before, (before, metrics)
held = sorted({n.split(".")[0] for n in sys.modules} & absent)
print(json.dumps({"imported": held, "steps": trainer.state.global_step, "accuracy": metrics["eval_accuracy"]}))
'''


def _distribution(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _closure(names: tuple[str, ...]) -> set[str]:
    """Distributions that an installation of `names` brings, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _distribution(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def absent_packages() -> set[str]:
    """Top-level modules that are installed here and would not be in a plain environment."""
    plain = _closure(CORE) | {"windlass", "pip", "setuptools"}
    installed = metadata.packages_distributions()
    return {module for module, owners in installed.items() if not {_distribution(o) for o in owners} & plain}


def test_the_plain_environment_is_plain() -> None:
    absent = absent_packages()
    assert "pytest" in absent
    assert not absent & {"torch", "numpy", "safetensors", "yaml", "sympy", "windlass"}


@pytest.mark.timeout(180)
def test_a_plain_module_trains_without_any_extra(tmp_path: Path) -> None:
    absent = absent_packages() | {
        "transformers",
        "datasets",
        "accelerate",
        "tokenizers",
        "rich",
        "matplotlib",
        "tqdm",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(sorted(absent)), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["imported"] == []
    assert report["steps"] == 32
    assert report["accuracy"] > 0.6
    assert (tmp_path / "out" / "metrics.jsonl").is_file()
