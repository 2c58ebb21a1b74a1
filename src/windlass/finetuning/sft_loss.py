"""The loss of supervised fine-tuning, with entropy and accuracy from the same forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.finetuning.token_figures import BatchSums
from windlass.metrics.tokens import IGNORE_INDEX

_CHUNK = 1024  # rows of logits that are turned into float32 probabilities at once


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of one batch.

    Attributes:
        total: sum of the losses of its targets, with a gradient.
        figures: sums for the log.
        outputs: of the model.
    """

    total: Tensor
    figures: BatchSums
    outputs: Any


def token_loss(model: nn.Module, inputs: Mapping[str, Any], loss_type: str, experts: bool) -> TokenLoss:
    """Run a batch through a causal language model and sum the losses of its targets.

    Args:
        inputs: a collated batch with `labels` of shape (batch, length), on the model's device. Label t is predicted from
            position t-1; -100 is not a target.
        loss_type: "nll": negative log-likelihood; "dft": the same, each term times its own probability, without
            gradient through that factor (arXiv:2508.05629).
        experts: request the load-balancing loss of a mixture of experts.
    """
    given = {name: value for name, value in inputs.items() if name != "labels"}
    given["use_cache"] = False
    if experts:
        given["output_router_logits"] = True
    outputs = model(**given)
    labels = inputs["labels"]
    logits = outputs.logits[:, -labels.shape[1] :]  # learnt prompts are in front
    total, entropy, correct, targets = _sums(logits[:, :-1], labels[:, 1:], loss_type)
    aux = getattr(outputs, "aux_loss", None) if experts else None
    figures = BatchSums(entropy, correct, targets, count_tokens(inputs), aux)
    return TokenLoss(total, figures, outputs)


def _sums(logits: Tensor, labels: Tensor, loss_type: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, entropy, correct predictions and number of targets, of the rows of `logits` that have a target."""
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses = F.cross_entropy(flat.float(), wanted, ignore_index=IGNORE_INDEX, reduction="none")
    if loss_type == "dft":
        losses = losses * torch.exp(-losses.detach())
    is_target = wanted != IGNORE_INDEX
    with torch.no_grad():
        entropy = torch.zeros((), device=flat.device)
        for start in range(0, flat.shape[0], _CHUNK):
            chosen = is_target[start : start + _CHUNK]
            log_p = F.log_softmax(flat[start : start + _CHUNK].float(), dim=-1)
            entropy = entropy - ((log_p.exp() * log_p).sum(-1) * chosen).sum()
        correct = ((flat.argmax(-1) == wanted) & is_target).sum()
    return losses.sum(), entropy, correct, is_target.sum()


def count_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """The inputs of a batch that are not padding, as a scalar tensor on its device."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask.sum()
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), dtype=torch.int64, device=ids.device)
