"""What belongs to a run: `train_runtime` is the time of training, not that of imports; compilations are counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.callbacks.rows import repeatable

_SCRIPT = """
import gc, sys, weakref
from windlass import Trainer, TrainerCallback
from tests.trainer.small import Net, arguments, rows
from pathlib import Path

class Look(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        assert "torch._dynamo" in sys.modules

trainer = Trainer(Net(), arguments(Path(sys.argv[1]), max_steps=1), train_dataset=rows(8), callbacks=[Look()])

assert "torch._dynamo" not in sys.modules
gc.disable()
trainer.train()
reference = weakref.ref(trainer)
del trainer
assert reference() is None, "held by a frame of the import"
"""


def test_the_compiler_is_imported_before_the_clock_starts_and_holds_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, cwd=root
    )
    assert found.returncode == 0, found.stderr


def test_compilations_are_in_the_summary(tmp_path: Path) -> None:
    """The last batch of the pass is smaller: another shape, which is compiled again."""
    torch._dynamo.reset()
    args = arguments(
        tmp_path, num_train_epochs=1, torch_compile_backend="eager", per_device_train_batch_size=4
    )
    trainer = Trainer(Net(), args, train_dataset=rows(10))
    metrics = trainer.train().metrics
    torch._dynamo.reset()
    assert (metrics["train_compiled_graphs"], metrics["train_recompilations"]) == (2, 1)
    assert trainer.state.log_history[-1]["train_recompilations"] == 1


def test_a_resumed_run_that_compiles_writes_the_same_metrics(tmp_path: Path) -> None:
    """Compilations are those of one process: a resumed one makes other graphs for the batches that are left."""
    written = []
    for name in ("whole", "resumed"):
        folder = tmp_path / name
        args = arguments(
            folder, num_train_epochs=1, max_steps=-1, torch_compile_backend="eager", per_device_train_batch_size=4,
            save_strategy="steps", save_steps=2, logging_steps=1,
        )  # fmt: skip
        if name == "resumed":
            shutil.copytree(tmp_path / "whole", folder, ignore=shutil.ignore_patterns("checkpoint-3"))
        torch._dynamo.reset()
        metrics = Trainer(Net(), args, train_dataset=rows(10)).train(name == "resumed").metrics
        torch._dynamo.reset()
        assert metrics["train_compiled_graphs"] == {"whole": 2, "resumed": 1}[name]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        written.append([repeatable(json.loads(line)) for line in lines])
    assert written[0] == written[1]
