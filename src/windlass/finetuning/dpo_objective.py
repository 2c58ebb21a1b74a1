"""The loss and the figures of one batch of pairs, for any split of an update into micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.finetuning.answer_log_probabilities import AnswerLogProbabilities, chosen_tokens_in, pairs_in
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.dpo_losses import PairTerms, pair_loss

# Two counts in one number, which the engine adds up over an update: pairs times this, and tokens. The sum is exact for
# 67 million pairs and as many tokens.
_TOKENS = 2.0**26


class UpdateLoss:
    """What the losses of a `DPOConfig` are means over: pairs; for "sft", the tokens of chosen answers.

    Attributes:
        counts_tokens: "sft" is one of the losses.
        is_scaled: the loss is divided by the counts of the whole update, and multiplied by the number of processes.
    """

    def __init__(self, args: DPOConfig) -> None:
        self.counts_tokens = "sft" in args.loss_type
        self.is_scaled = self.counts_tokens

    def count(self, batch: Any) -> float:
        """The count of a batch in host memory, for the engine."""
        pairs = pairs_in(batch)
        if not self.counts_tokens:
            return float(pairs)
        return pairs * _TOKENS + chosen_tokens_in(batch)

    def divisors(self, terms: PairTerms, count: Tensor | int | None) -> tuple[Tensor | float, Tensor | float]:
        """What sums over pairs and sums over tokens are divided by: the counts of the update, or those of the batch if
        `count` is None or counts pairs alone.
        """
        if count is None or not self.is_scaled:
            return float(len(terms.chosen)), terms.chosen_tokens.sum().clamp(min=1)
        pairs = torch.div(torch.as_tensor(count), _TOKENS, rounding_mode="floor")
        return pairs, (torch.as_tensor(count) - pairs * _TOKENS).clamp(min=1)

    def loss(self, sums: tuple[Tensor, Tensor], terms: PairTerms, count: Tensor | int | None) -> Tensor:
        """The loss of a batch, from its sums over pairs and over tokens."""
        of_pairs, of_tokens = self.divisors(terms, count)
        return sums[0] / of_pairs + sums[1] / of_tokens


def loss_sums(found: AnswerLogProbabilities, terms: PairTerms, args: DPOConfig) -> tuple[Tensor, Tensor]:
    """The weighted losses of a batch, with graphs: their sum over pairs, and that of "sft" over chosen tokens."""
    weights = _pair_weights(found) if args.use_weighting else None
    of_pairs = of_tokens = terms.chosen.new_zeros(())
    for kind, weight in args.weighted_losses:
        if kind == "sft":
            chosen, _ = found.split(found.tokens.log_probabilities)
            of_tokens = of_tokens - weight * chosen.sum()
            continue
        each = pair_loss(kind, terms, args)
        of_pairs = of_pairs + weight * (each if weights is None else each * weights).sum()
    return of_pairs, of_tokens


def _pair_weights(found: AnswerLogProbabilities) -> Tensor:
    """Equation 2 of arXiv:2406.11827, with weights aligned by the model's own distribution."""
    with torch.no_grad():
        aligned = found.tokens.log_probabilities - found.tokens.log_collisions
        means = aligned.sum(dim=1) / found.mask.sum(dim=1).clamp(min=1)
        chosen, rejected = found.split(means.exp())
        return chosen * rejected


def figures_of(
    found: AnswerLogProbabilities, terms: PairTerms, beta: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums of a batch for the log, each with its weight."""
    pairs = terms.chosen.new_tensor(len(terms.chosen))
    chosen_tokens, rejected_tokens = terms.chosen_tokens.sum(), terms.rejected_tokens.sum()
    logits = [part.sum() for part in found.split(found.tokens.mean_logits)]
    correct, _ = found.split(found.tokens.correct)
    chosen, rejected = (beta * ratios for ratios in terms.ratios)
    return {
        "entropy": (found.tokens.entropies.sum(), chosen_tokens + rejected_tokens),
        "mean_token_accuracy": (correct.sum(), chosen_tokens),
        "logits/chosen": (logits[0], chosen_tokens),
        "logits/rejected": (logits[1], rejected_tokens),
        "logps/chosen": (terms.chosen.sum(), pairs),
        "logps/rejected": (terms.rejected.sum(), pairs),
        "rewards/chosen": (chosen.sum(), pairs),
        "rewards/rejected": (rejected.sum(), pairs),
        "rewards/accuracies": ((chosen > rejected).sum(), pairs),
        "rewards/margins": ((chosen - rejected).sum(), pairs),
    }
