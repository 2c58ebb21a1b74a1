"""Log-probabilities of answers under a causal language model, from one forward without whole logits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.types import IGNORED
from windlass.transforms.branches import branched_row
from windlass.transforms.lean_loss import lean_log_probabilities
from windlass.transforms.linear_log_probabilities import TokenLogProbabilities

# Of a batch, what is not given to the model.
_NOT_INPUTS = frozenset(
    {"completion_mask", "ref_chosen_logps", "ref_rejected_logps", "margin", "label", "ref_logps", "groups",
     "answer_places", "answer_mask", "sequence_lengths"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerLogProbabilities:
    """What one forward finds out about a batch of answers."""

    sums: Tensor  # log-probability of each answer, shape (rows,)
    # Figures of each token, at the position that predicts it; shape (rows, length). Of a batch in one row, (rows,
    # longest answer).
    tokens: TokenLogProbabilities
    mask: Tensor  # 1 at positions that predict a token of an answer; shape of `tokens`
    # The load-balancing loss of a mixture of experts; None if the model returns none
    auxiliary: Tensor | None

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the chosen and of the rejected answers."""
        chosen, rejected = values.chunk(2)
        return chosen, rejected


def model_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What of a batch the model gets."""
    return {name: value for name, value in inputs.items() if name not in _NOT_INPUTS}


def answer_log_probabilities(
    model: nn.Module, inputs: Mapping[str, Any], ld_alpha: float | None = None
) -> AnswerLogProbabilities:
    """Run a batch through a model.

    Args:
        model: a causal language model, in any wrappers.
        inputs: `input_ids`, `attention_mask` and `completion_mask`, each of shape (rows, length); or what
            `DataCollatorForSharedPrompts` makes. With `ld_alpha` the second half of the rows are the rejected answers
            of the first half.
        ld_alpha: weight of the tokens of an answer beyond the length of the other one (arXiv:2409.06411).
    """
    answers = inputs["completion_mask"]
    labels = inputs["input_ids"].masked_fill(answers == 0, IGNORED)
    groups = inputs.get("groups")
    with contextlib.nullcontext() if groups is None else branched_row(groups):
        tokens, auxiliary = lean_log_probabilities(model, {**model_inputs(inputs), "labels": labels})
    if groups is None:
        mask = torch.nn.functional.pad(answers[:, 1:], (0, 1))
    else:
        mask, places = inputs["answer_mask"], inputs["answer_places"]
        tokens = TokenLogProbabilities(*(torch.where(mask > 0, values[0][places], 0) for values in tokens))
    weights = None if ld_alpha is None else _length_weights(mask, ld_alpha).to(tokens.log_probabilities)
    per_token = tokens.log_probabilities if weights is None else tokens.log_probabilities * weights
    return AnswerLogProbabilities(per_token.sum(dim=1), tokens, mask, auxiliary)


def pairs_in(batch: Mapping[str, Any]) -> int:
    """The pairs of a batch."""
    return len(batch["answer_mask" if "groups" in batch else "input_ids"]) // 2


def chosen_tokens_in(batch: Mapping[str, Any]) -> float:
    """The tokens of the chosen answers of a batch."""
    if "groups" in batch:
        return float(batch["answer_mask"][: pairs_in(batch)].sum())
    return float(batch["completion_mask"][: pairs_in(batch), 1:].sum())


def _length_weights(mask: Tensor, alpha: float) -> Tensor:
    """1 for the first tokens of both answers of a pair, as many as the shorter one has, and `alpha` beyond them."""
    positions, lengths = mask.cumsum(dim=1), mask.sum(dim=1)
    shared = torch.minimum(*lengths.chunk(2)).repeat(2)
    return torch.where(positions <= shared[:, None], 1.0, alpha)
