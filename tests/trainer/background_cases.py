"""Runs whose disk is slow until an update of theirs has passed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.checkpoint.files import Files
from windlass.trainer.run_checkpoints import RunCheckpoints


class Noting(Trainer):
    """Notes of each save: its step, the step at which the run learned how it ended, and the folder."""

    latest: Noting

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: list[tuple[int, int, str | None]] = []
        Noting.latest = self


def _noting(ended: Any) -> Any:
    def noted(checkpoints: RunCheckpoints, as_saved: Any, *given: Any) -> None:
        trainer = getattr(Noting, "latest", None)
        run = None if trainer is None else trainer._run
        if trainer is not None and (trainer.is_in_train or (run and run.checkpoints is checkpoints)):
            name = None if given[-1] is None else given[-1].name
            trainer.notes.append((as_saved.global_step, trainer.state.global_step, name))
        ended(checkpoints, as_saved, *given)

    return noted


RunCheckpoints._ended = _noting(RunCheckpoints._ended)  # type: ignore[method-assign]


class Weights(TrainerCallback):
    """The weights after each update."""

    def __init__(self) -> None:
        self.after: dict[int, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after[state.global_step] = model.layer.weight.detach().clone()


class SlowDisk(TrainerCallback):
    """Takes nothing from threads of the background until update `until` has ended."""

    def __init__(self, until: int, only_rank: int | None = None) -> None:
        self._until, self._open = until, threading.Event()
        self.writers: list[str] = []  # the thread of each write that was let through, in their order
        if only_rank not in (None, int(os.environ.get("RANK", "0"))):
            self._open.set()

    def __enter__(self) -> SlowDisk:
        self._write = Files.write_some

        def write(files: Files, descriptor: int, piece: memoryview) -> int:
            if threading.current_thread().name.startswith("windlass-save"):
                assert self._open.wait(60)
                self.writers.append(threading.current_thread().name)
            return self._write(files, descriptor, piece)

        Files.write_some = write  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Files.write_some = self._write  # type: ignore[method-assign]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._until:
            self._open.set()


def trainer_of(
    folder: Path, *callbacks: TrainerCallback, kind: type[Trainer] = Noting, **changes: Any
) -> Any:
    settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 2, **changes}
    data = [{**row, "x": row["x"].double()} for row in rows(64)]
    return kind(
        Net().double(),
        arguments(folder, **settings),
        train_dataset=data,
        eval_dataset=data[:6],
        callbacks=list(callbacks),
    )
