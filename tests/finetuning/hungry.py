"""A language model that runs out of memory in the second micro-batch of an update."""

from __future__ import annotations

from typing import Any

import torch
from tests.finetuning import small
from transformers import LlamaForCausalLM


class Hungry(LlamaForCausalLM):
    """Fails in training with more than `limit` rows, but in the first forward."""

    limit, calls = 4, 0

    @classmethod
    def of(cls, limit: int) -> Hungry:
        torch.manual_seed(0)
        made = cls(small.config())
        made.limit = limit
        return made

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        learns = self.training and torch.is_grad_enabled()
        self.calls += learns
        if learns and self.calls > 1 and len(input_ids) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(input_ids=input_ids, **inputs)
