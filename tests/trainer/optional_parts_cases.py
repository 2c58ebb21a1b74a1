"""A model of which each batch uses some parts, and one none: trained in one process or on ranks, in any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.test_losses import trainer_for
from torch import Tensor, nn

# The head that each row is for. An update takes four rows: both heads, one, one per rank, the other one.
HEADS = "010100000011111110010000"
# Rows of a micro-batch, and micro-batches of an update on each rank, by the number of ranks.
SPLITS = {1: [(4, 1)], 2: [(2, 1), (1, 2)]}


class Heads(nn.Module):
    """The head of each row is called if the batch has such a row, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        self.pooler = nn.Linear(3, 3)

    def forward(self, x: Tensor, head: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        logits = hidden.new_zeros(len(x), 2)
        for index, layer in enumerate(self.heads):
            if (head == index).any():
                logits[head == index] = layer(hidden[head == index])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder: Path, split: tuple[int, int], **changes: Any) -> dict[str, list[float]]:
    """Return the weights after an update for each four of `HEADS`."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.randn(3, generator=generator), "head": int(head), "labels": index % 2}
        for index, head in enumerate(HEADS)
    ]
    micro, accumulation = split
    torch.manual_seed(0)
    trainer = trainer_for(
        folder, data=rows, model=Heads(), max_steps=len(HEADS) // 4, train_sampling_strategy="sequential",
        per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, learning_rate=0.1,
        weight_decay=0.1, **changes,
    )  # fmt: skip
    trainer.train()
    weights = {name: weight.detach().flatten().tolist() for name, weight in trainer.model.named_parameters()}
    trainer.end()
    return weights
