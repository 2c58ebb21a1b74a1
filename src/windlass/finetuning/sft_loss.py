"""The loss of supervised fine-tuning, with entropy and accuracy from the same forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.finetuning.token_figures import BatchSums
from windlass.transforms.lean_loss import lean_causal_lm_loss
from windlass.transforms.linear_cross_entropy import LossOptions


def sft_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    count: Tensor | float | None,
    options: LossOptions,
    aux_weight: float,
) -> tuple[Tensor, BatchSums]:
    """Run a batch through a causal language model, without making its logits if its head allows that.

    Args:
        inputs: a collated batch with `labels` of shape (batch, length), on the model's device. Label t is predicted
            from position t-1; -100 is not a target.
        count: divides the sum of losses; None: the number of targets in the batch.
        options: label smoothing, and whether each term is weighted by its own probability.
        aux_weight: factor of the load-balancing loss of a mixture of experts.

    Returns:
        the loss, a scalar with a graph, and the sums for the log.
    """
    divisor = None if count is None else torch.as_tensor(count).clamp(min=1)
    loss, found = lean_causal_lm_loss(
        model, inputs, divisor, options=options, router_aux_loss_coef=aux_weight
    )
    sums = BatchSums(found.entropy, found.correct, found.targets, count_tokens(inputs), found.auxiliary)
    return loss, sums


def count_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """The inputs of a batch that are not padding, as a scalar tensor on its device."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask.sum()
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), dtype=torch.int64, device=ids.device)
