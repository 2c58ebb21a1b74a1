"""A language model that is out of memory in its second forward of more than some rows."""

from __future__ import annotations

from typing import Any

import torch
from tests.finetuning import small
from transformers import LlamaForCausalLM


class Hungry(LlamaForCausalLM):
    """Fails in training, from the second forward of an update on."""

    limit, calls = 4, 0

    @classmethod
    def of(cls, limit: int) -> Hungry:
        torch.manual_seed(0)
        made = cls(small.config())
        made.limit = limit
        return made

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        if (
            self.training
            and torch.is_grad_enabled()
            and input_ids is not None
            and len(input_ids) > self.limit
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(input_ids=input_ids, **inputs)
