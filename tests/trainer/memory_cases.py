"""A model that says it is out of memory above a number of rows, in double precision, and what it was trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from windlass import Trainer, TrainingArguments

SAMPLES = 44  # in updates of 12: four an epoch, the last one of 8


class Hungry(nn.Module):
    """Batch norm keeps buffers and changes them before it fails, dropout draws, and `limit` rows fit: in training, and
    in evaluation.
    """

    def __init__(
        self, limit: int, dropout: float = 0.0, norm: bool = False, eval_limit: int | None = None
    ) -> None:
        super().__init__()
        self.limit, self.eval_limit = limit, limit if eval_limit is None else eval_limit
        self.noisy = dropout > 0  # draws from the generators that are seeded once, too
        self.from_step, self.calls = 0, 0
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)
        self.seen: list[list[int]] = []
        self.double()

    def forward(self, x: Tensor, index: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.body(x))
        if self.noisy and self.training:
            hidden = hidden * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        learning = self.training and torch.is_grad_enabled()
        self.calls += learning
        limit = self.limit if self.training else self.eval_limit
        if len(x) > limit and (not learning or self.calls > self.from_step):
            raise self.error
        if learning:
            self.seen.append(index.tolist())
        out = self.head(self.drop(torch.relu(hidden))).squeeze(-1)
        return (out - labels).square().mean(), out


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "index": index, "labels": x.sum().sin()}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Samples()[index] for index in range(SAMPLES))


def trainer_for(folder: Path, model: nn.Module, data: Any = None, **changes: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 12,
        "per_device_eval_batch_size": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "auto_find_batch_size": True,
        "ddp_timeout": 60,
    }
    args = TrainingArguments(output_dir=str(folder), **{**chosen, **changes})
    return Trainer(model, args, train_dataset=data or Samples(), eval_dataset=Samples())


def hungry(limit: int, **options: Any) -> Hungry:
    torch.manual_seed(0)
    return Hungry(limit, **options)


def flat(model: nn.Module) -> Tensor:
    """All weights and buffers as one vector."""
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])
