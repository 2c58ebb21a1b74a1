"""A run in which everything is random that may be, ways to kill it, and what its outcome is compared by."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from windlass import Trainer, TrainerCallback, TrainingArguments
from windlass.core.module_state import state_of
from windlass.dist.sharded import local

SAMPLES = 36  # in updates of 8: five an epoch, the last one of 4


class Net(nn.Module):
    """Dropout draws, batch norm keeps buffers. `seen` holds the samples of the updates, in order."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, 2)
        self.seen: list[int] = []

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen += index.tolist()
        logits = self.head(self.drop(torch.relu(self.norm(self.body(x)))))
        return nn.functional.cross_entropy(logits, labels), logits


def sample(index: int) -> dict[str, Any]:
    """Augmented by draws from all three default generators."""
    x = torch.randn(6, generator=torch.Generator().manual_seed(index))
    noise = torch.randn(6) + random.random() + float(np.random.rand())
    return {"x": x + 0.1 * noise, "labels": int(x.sum() > 0), "index": index}


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Quiet(Samples):
    """Reading draws nothing."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": int(x.sum() > 0), "index": index}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (sample(index) for index in range(SAMPLES))


class Drawing(Trainer):
    """A step that draws from Python's and NumPy's generators, which no code seeds at each update."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss, logits = model(**inputs)
        loss = loss * (random.random() + float(np.random.rand()))
        return (loss, (loss, logits)) if return_outputs else loss


@dataclass(frozen=True)
class Case:
    """One way to train. The parts are made again for each process."""

    arguments: dict[str, Any] = field(default_factory=dict)
    dataset: Callable[[], Any] = Samples
    callbacks: Callable[[], list[Any]] = list
    optimizers: Callable[[nn.Module], tuple[Any, Any]] = lambda model: (None, None)
    trainer: type[Trainer] = Trainer
    model: Callable[[], nn.Module] = Net


def arguments_for(folder: Path | str, **changes: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "ddp_timeout": 60,
    }
    return TrainingArguments(output_dir=str(folder), **{**chosen, **changes})


def build(folder: Path | str, case: Case, *more: Any, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    model = case.model()
    return case.trainer(
        model,
        arguments_for(folder, **{**case.arguments, **changes}),
        train_dataset=case.dataset(),
        eval_dataset=Samples(),
        callbacks=[*case.callbacks(), *more],
        optimizers=case.optimizers(model),
    )


def run(
    folder: Path | str, case: Case, *more: Any, resume: bool | str | Path | None = None, **changes: Any
) -> Trainer:
    trainer = build(folder, case, *more, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# --- killing --------------------------------------------------------------------------------------------------------


def kill(event: str, step: int, occurrence: int = 1, only_rank: int | None = None) -> TrainerCallback:
    """A callback that kills its process, as the system would, at an event of a step."""
    left = [occurrence]

    def die(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step and only_rank in (None, int(os.environ.get("RANK", "0"))):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return type("Kill", (TrainerCallback,), {event: die})()  # type: ignore[no-any-return]


KILLED = -signal.SIGKILL


def in_a_child(work: Callable[[], Any]) -> int:
    """Do it in a process of its own, which may be killed; return its exit code (negative: the signal)."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the process ends with it)
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def resumable(folder: Path) -> bool | None:
    """What to give as `resume_from_checkpoint`: True as soon as there is something to resume from."""
    return True if list(folder.glob("checkpoint-*")) else None


def killed_at_steps(folder: Path, case: Case, steps: Iterable[int]) -> Trainer:
    """A run that is killed at the end of these updates, one after another, and resumed each time."""
    for step in steps:
        killed_run = partial(run, folder, case, kill("on_step_end", step), resume=resumable(folder))
        code = in_a_child(killed_run)
        assert code == KILLED, f"step {step}: exit code {code}"
    return run(folder, case, resume=resumable(folder))


# --- comparing ------------------------------------------------------------------------------------------------------


def bits(trainer: Trainer) -> str:
    """One hash over weights, buffers and the optimizer's state, as far as this rank holds them."""
    digest = hashlib.sha256()
    for name, tensor in state_of(trainer.model).items():
        digest.update(name.encode() + local(tensor).detach().numpy().tobytes())
    assert trainer.optimizer is not None
    for state in trainer.optimizer.state_dict()["state"].values():
        for name, value in sorted(state.items()):
            value = value if isinstance(value, Tensor) else torch.as_tensor(value)
            digest.update(name.encode() + local(value).numpy().tobytes())
    return digest.hexdigest()


def rows(folder: Path) -> list[dict[str, Any]]:
    """What the run said of itself, but for the time it took."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in lines]


def same_run(folder: Path, trainer: Trainer, other_folder: Path, other: Trainer) -> None:
    """Assert that two runs came to the same end by the same way."""
    assert rows(folder) == rows(other_folder)
    assert bits(trainer) == bits(other)
    assert trainer.state.global_step == other.state.global_step
    assert trainer.state.epoch == other.state.epoch
    assert trainer.state.best_metric == other.state.best_metric
    assert trainer.state.best_global_step == other.state.best_global_step


class Recorder(TrainerCallback):
    """Writes each event to a file, so that a killed process leaves its last words. Checkpoints hold its state, so that
    it sees each epoch begin once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}

    def _note(self, name: str, state: Any) -> None:
        with self._path.open("a") as file:
            file.write(f"{name} {state.global_step} {state.epoch:.6f}\n")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("epoch_begin", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("epoch_end", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("step_end", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("evaluate", state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("log", state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("save", state)


def events(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
