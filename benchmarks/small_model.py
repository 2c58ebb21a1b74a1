"""The language model of the benchmarks that time a `Trainer` beside something else."""

from __future__ import annotations

from typing import Any

from torch import nn


class SmallModel(nn.Module):
    """A transformer encoder over tokens, with its cross-entropy."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        logits = self.head(self.body(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
