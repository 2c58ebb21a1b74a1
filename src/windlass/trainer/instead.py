"""What takes the place of a run: `train()` of any Trainer in this process gives up what it would run with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from windlass.config.arguments import TrainingArguments
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.services import Services
from windlass.transforms.strategy import Strategy


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a call of `train()` makes its run of; nothing of it is prepared."""

    args: TrainingArguments
    services: Services
    hooks: TrainHooks
    optimizer: torch.optim.Optimizer | None  # one that the script made before
    tokenizer: Any  # whose special tokens the model's configuration gets
    new_files: Callable[[Strategy], ModelWriter]  # makes the writer of the model on its strategy


Instead = Callable[[RunRequest], NoReturn]
_chosen: list[Instead] = []


@contextlib.contextmanager
def instead_of_runs(call: Instead) -> Iterator[None]:
    """Within the body, `train()` checks its arguments, and then calls `call`, which raises, instead of running."""
    _chosen.append(call)
    try:
        yield
    finally:
        _chosen.remove(call)


def takes_place() -> bool:
    """Return True if something takes the place of a run, so that nothing is trained."""
    return bool(_chosen)


def give_way(request: Callable[[], RunRequest]) -> None:
    """Call what takes the place of a run, if something does."""
    if _chosen:
        _chosen[-1](request())
