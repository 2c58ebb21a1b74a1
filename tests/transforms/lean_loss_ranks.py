"""Run on two ranks: loss and log-probabilities without logits through DDP and FSDP2, compared with one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.transforms.lean_loss import lean_causal_lm_loss, lean_log_probabilities


def _model(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, tie_word_embeddings=tied, **sizes))


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def _sharded(model: Any, head: bool) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    if head:
        fully_shard(model.lm_head)
    return fully_shard(model)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    gang = join(world_from_environment(), torch.device("cpu"))
    rank, size, batch = dist.get_rank(), dist.get_world_size(), _batch()
    mine = {name: value[rank : rank + 1] for name, value in batch.items()}
    count = int((batch["labels"][:, 1:] != -100).sum())
    cases = {
        "ddp": (False, lambda m: nn.parallel.DistributedDataParallel(m)),
        "ddp that looks for unused parameters": (
            False,
            lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True),
        ),
        "fsdp, tied": (True, lambda m: _sharded(m, head=False)),
        "fsdp": (False, lambda m: _sharded(m, head=False)),
        "fsdp with a head of its own": (False, lambda m: _sharded(m, head=True)),
    }
    for name, (tied, wrap) in cases.items():
        alone = _model(tied)
        alone(**batch).loss.backward()
        model = _model(tied)
        wrapped = wrap(model)
        for _ in range(2):  # the first one also measures the head
            model.zero_grad()
            loss, figures = lean_causal_lm_loss(wrapped, copy.copy(mine), count)
            (loss * size).backward()
        assert figures.targets == (mine["labels"][:, 1:] != -100).sum(), name
        for (parameter, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                _whole(own.grad), other.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}"
            )
    for name, (tied, wrap) in cases.items():
        alone = _model(tied)
        logs, _ = lean_log_probabilities(alone, batch)
        (-nn.functional.logsigmoid(logs.log_probabilities.sum(dim=1))).sum().backward()
        model = _model(tied)
        wrapped = wrap(model)
        logs, _ = lean_log_probabilities(wrapped, copy.copy(mine))
        (-nn.functional.logsigmoid(logs.log_probabilities.sum(dim=1)) * size).sum().backward()
        for (parameter, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                _whole(own.grad), other.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}"
            )
    del gang
    leave()
