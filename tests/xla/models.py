"""The model, the data and the runs that the tests of PyTorch/XLA share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from windlass import Trainer, TrainingArguments
from windlass.core import xla

needs_xla = pytest.mark.skipif(not xla.is_selected(), reason="needs torch_xla: make test-xla")
TOLERANCE = 1e-5
WORDS, WIDTH = 32, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Language(nn.Module):
    """A small language model with tied embeddings, optional dropout, and a buffer that forwards change."""

    _no_split_modules = ["Layer"]

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int32))

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        if self.training:
            self.forwards += 1
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.dropout(hidden))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def new_model(**options: Any) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def rows(count: int = 64, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Samples whose label is the next word of a fixed sequence."""
    words = torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"words": row, "labels": (row * 5 + 1) % WORDS} for row in words]


def new_trainer(
    folder: Path, model: nn.Module | None = None, callbacks: Any = None, **options: Any
) -> Trainer:
    """A trainer with updates of two micro-batches of four samples, which reports every loss."""
    settings: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_steps": 3, "report_to": "none",
    }  # fmt: skip
    args = TrainingArguments(str(folder), **{**settings, **options})
    model = new_model() if model is None else model
    return Trainer(model, args, train_dataset=rows(), eval_dataset=rows(12), callbacks=callbacks)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, by name."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def counters() -> dict[str, int]:
    """What the device was asked for so far: graphs compiled, graphs looked up, syncs, and transfers to the host.

    All are counted when they are requested. How long a graph ran is measured later, by another thread.
    """
    from torch_xla.debug import metrics

    counted = {
        name: metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile", "MarkStep")
    }
    compiled = metrics.metric_data("CompileTime") or (0,)
    read = metrics.metric_data("TransferFromDeviceTime") or (0,)
    return {
        "compiled": int(compiled[0]), "graphs": counted["UncachedCompile"] + counted["CachedCompile"],
        "syncs": counted["MarkStep"], "read": int(read[0]),
    }  # fmt: skip
