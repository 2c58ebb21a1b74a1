"""A Trainer on PyTorch/XLA's devices against the CPU: losses, weights, graphs, checkpoints."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.xla.models import (
    TOLERANCE,
    counters,
    furthest,
    losses,
    needs_xla,
    new_model,
    new_trainer,
    rows,
    weights,
)

from windlass import TrainerCallback
from windlass.core import xla
from windlass.core.errors import NonFiniteError
from windlass.core.rng import load_rng_state, rng_state

pytestmark = [pytest.mark.xla, needs_xla]


def test_losses_and_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    here, there = new_trainer(tmp_path / "xla"), new_trainer(tmp_path / "cpu", use_cpu=True)
    here.train()
    there.train()
    assert here.args.device.type == "xla"
    assert there.args.device.type == "cpu"
    assert losses(here) == pytest.approx(losses(there), abs=TOLERANCE)
    assert furthest(weights(here.model), weights(there.model)) < TOLERANCE
    assert here.evaluate()["eval_loss"] == pytest.approx(there.evaluate()["eval_loss"], abs=TOLERANCE)
    assert torch.tensor(here.predict(here.eval_dataset).predictions).shape == (12, 8, 32)


class Counters(TrainerCallback):
    """What the device was asked for up to the beginning of each update."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(counters())


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True, "optim": "adamw_torch_xla", "lr_scheduler_type": "cosine"}]
)
def test_one_graph_one_sync_and_no_read_in_an_update(tmp_path: Path, options: dict[str, Any]) -> None:
    """The optimizer's state is made in the first update, and the sum of losses exists from the second on."""
    seen = Counters()
    trainer = new_trainer(
        tmp_path, callbacks=[seen], max_steps=9, logging_steps=50, save_strategy="no", **options
    )
    trainer.train()
    # Loss and norm of the update before are read when this one was started: the check for values that are not finite.
    settled = seen.found[3:]
    for earlier, later in itertools.pairwise(settled):
        asked = {name: later[name] - earlier[name] for name in later}
        assert asked == {"compiled": 0, "graphs": 1, "syncs": 1, "read": 2}


class BatchCounters(TrainerCallback):
    """What the device was asked for up to each batch of an evaluation."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(counters())


def test_each_batch_of_an_evaluation_is_one_graph_and_is_not_read(tmp_path: Path) -> None:
    seen = BatchCounters()
    trainer = new_trainer(tmp_path, callbacks=[seen], per_device_eval_batch_size=4)
    trainer.predict(rows(26))
    settled = seen.found[1:]  # the sum of losses exists from the second batch on
    changes = [{name: b[name] - a[name] for name in b} for a, b in itertools.pairwise(settled)]
    assert len(changes) == 5
    assert all(change == {"compiled": 0, "graphs": 1, "syncs": 1, "read": 0} for change in changes[:-1])
    assert changes[-1] == {"compiled": 1, "graphs": 1, "syncs": 1, "read": 0}  # two samples


def test_another_shape_is_one_more_graph(tmp_path: Path) -> None:
    """Eleven samples in micro-batches of two: the last update of an epoch is shorter."""
    seen = Counters()
    trainer = new_trainer(
        tmp_path, callbacks=[seen], num_train_epochs=4, max_steps=-1, per_device_train_batch_size=2,
        gradient_accumulation_steps=1, logging_steps=50, save_strategy="no",
    )  # fmt: skip
    trainer.train_dataset = trainer.train_dataset[:11]
    trainer.train()
    compiled = [row["compiled"] for row in seen.found]
    assert len(compiled) == 24
    assert len(set(compiled[7:])) == 1  # both shapes were met in the first epoch
    assert compiled[6] - compiled[5] == 1


def test_a_run_resumes_with_the_same_bits_and_the_same_dropout(tmp_path: Path) -> None:
    whole = new_trainer(tmp_path / "whole", new_model(dropout=0.2))
    whole.train()
    first = new_trainer(tmp_path / "parts", new_model(dropout=0.2), max_steps=6)
    first.add_callback(_StopAt(3))
    first.train()
    second = new_trainer(tmp_path / "parts", new_model(dropout=0.2))
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    assert furthest(weights(second.model), weights(whole.model)) == 0


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self._step


def test_a_checkpoint_is_read_and_continued_on_the_cpu(tmp_path: Path) -> None:
    here = new_trainer(tmp_path / "xla")
    here.train()
    saved = load_file(tmp_path / "xla" / "checkpoint-6" / "model.safetensors")
    assert "head.weight" not in saved  # one tensor, as in a checkpoint from the CPU
    assert all(torch.equal(value, weights(here.model)[name]) for name, value in saved.items())
    there = new_trainer(tmp_path / "xla", use_cpu=True)
    there.train(resume_from_checkpoint=str(tmp_path / "xla" / "checkpoint-3"))
    assert losses(there) == pytest.approx(losses(here), abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {
            "gradient_accumulation_steps": 3,
            "num_train_epochs": 2,
            "max_steps": -1,
        },  # 16 micro-batches in an epoch
        {"label_smoothing_factor": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
        {"nonfinite_policy": "skip"},
    ],
    ids=["short last groups", "smoothed labels", "best model", "skipping"],
)
def test_what_changes_an_update_does_so_as_on_the_cpu(tmp_path: Path, options: dict[str, Any]) -> None:
    here, there = (
        new_trainer(tmp_path / name, **options, **where)
        for name, where in (("xla", {}), ("cpu", {"use_cpu": True}))
    )
    here.train()
    there.train()
    assert losses(here) == pytest.approx(losses(there), abs=TOLERANCE)
    assert furthest(weights(here.model), weights(there.model)) < TOLERANCE
    assert here.state.best_metric == pytest.approx(there.state.best_metric, abs=TOLERANCE)


def test_a_checkpoint_of_the_cpu_is_continued_here(tmp_path: Path) -> None:
    there = new_trainer(tmp_path, use_cpu=True)
    there.train()
    here = new_trainer(tmp_path)
    here.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(here) == pytest.approx(losses(there), abs=TOLERANCE)


def test_the_state_of_a_generator_of_another_kind_of_device_is_left_out() -> None:
    state = rng_state(xla.device())
    load_rng_state(
        {**state, "device": torch.zeros(16, dtype=torch.uint8), "device_type": "cuda"}, xla.device()
    )
    assert torch.equal(rng_state(xla.device())["device"], state["device"])


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.xla.models import new_model, new_trainer, xla
from windlass import TrainerCallback

class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

xla.device()
new_trainer(Path(sys.argv[1]), new_model(dropout=0.2), callbacks=[Killed()], save_steps=1).train()
"""


def test_a_killed_run_is_continued_with_the_same_bits(tmp_path: Path, root: Path) -> None:
    whole = new_trainer(tmp_path / "whole", new_model(dropout=0.2))
    whole.train()
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")],
        env={**inherited, "PYTHONPATH": str(root)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    again = new_trainer(tmp_path / "killed", new_model(dropout=0.2), save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    assert furthest(weights(again.model), weights(whole.model)) == 0


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    model = new_model()
    with torch.no_grad():
        model.layers[0].linear.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="at step 1"):
        new_trainer(tmp_path, model).train()


def test_clipping_takes_place_on_the_device(tmp_path: Path) -> None:
    here = new_trainer(tmp_path / "xla", max_grad_norm=0.01, optim="sgd")
    there = new_trainer(tmp_path / "cpu", max_grad_norm=0.01, optim="sgd", use_cpu=True)
    here.train()
    there.train()
    assert furthest(weights(here.model), weights(there.model)) < TOLERANCE
    assert losses(here) == pytest.approx(losses(there), abs=TOLERANCE)


def test_what_a_loss_is_a_mean_over_is_measured_as_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library counts the true values of a mask as 1, so targets on the device were counted wrongly."""
    new_trainer(tmp_path, max_steps=1, save_strategy="no").train()
    assert "does not follow from the losses of its halves" not in caplog.text
