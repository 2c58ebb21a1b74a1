"""The losses of pairs, and the figures of one batch of them, for any split of an update into batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.finetuning.answer_log_probabilities import AnswerLogProbabilities, chosen_tokens_in, pairs_in
from windlass.finetuning.dpo_config import DPOConfig

# The losses of direct preference optimisation, each a pure function of the log-probabilities of pairs.
#
# All of them are those of TRL 1.16 under the same names. Tensors are of shape (pairs,).

# Above these, exp leaves the range of the type.
_MOST_EXPONENT = {torch.float16: 11.0, torch.float64: 700.0}


@dataclass(frozen=True, slots=True)
class PairTerms:
    """The log-probabilities of the answers of pairs.

    Attributes:
        chosen, rejected: of the model.
        ref_chosen, ref_rejected: of the reference.
        chosen_tokens, rejected_tokens: how many tokens each answer has.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """log(model / reference) of the chosen and of the rejected answers."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected


def scores(ratios: Tensor, args: DPOConfig) -> Tensor:
    """Return f'(t) for t = exp(ratios), of the divergence that holds the model to its reference (arXiv:2309.16240)."""
    if args.f_divergence_type == "forward_kl":
        return 1 - torch.exp(-ratios)
    if args.f_divergence_type == "js_divergence":
        return math.log(2) + F.logsigmoid(ratios)
    power = args.f_alpha_divergence_coef - 1.0
    if args.f_divergence_type == "reverse_kl" or abs(power) < 1e-6:  # the limit of alpha -> 1
        return ratios
    exponent = (power * ratios).clamp(max=_MOST_EXPONENT.get(ratios.dtype, 80.0))
    # A ratio near 0 makes exp(...) - 1 a difference of nearly equal numbers, of which 8 or 11 bits leave nothing.
    precise = torch.promote_types(ratios.dtype, torch.float32)
    return (torch.exp(exponent.to(precise)) - 1.0).to(ratios.dtype) / power


def pair_loss(kind: str, terms: PairTerms, args: DPOConfig) -> Tensor:
    """The loss of each pair; `kind` is one of `LOSS_TYPES` other than "sft"."""
    return _LOSSES[kind](terms, args)


def _delta(terms: PairTerms, args: DPOConfig) -> Tensor:
    chosen, rejected = terms.ratios
    return scores(chosen, args) - scores(rejected, args)


def _sigmoid(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2305.18290, equation 7."""
    return -F.logsigmoid(args.beta * _delta(terms, args))


def _hinge(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2305.10425 (SLiC)."""
    return torch.relu(1 - args.beta * _delta(terms, args))


def _per_token(terms: PairTerms, args: DPOConfig) -> Tensor:
    """The difference of scores, each divided by the tokens of its answer."""
    chosen, rejected = terms.ratios
    return scores(chosen, args) / terms.chosen_tokens.clamp(min=1) - scores(
        rejected, args
    ) / terms.rejected_tokens.clamp(min=1)


def _ipo(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2310.12036, equation 17, on means over tokens; beta is its tau."""
    return (_per_token(terms, args) - 1 / (2 * args.beta)) ** 2


def _sigmoid_norm(terms: PairTerms, args: DPOConfig) -> Tensor:
    return -F.logsigmoid(args.beta * _per_token(terms, args))


def _exo_pair(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2402.00856, equation 16: the divergence of the model's choice from the smoothed preference."""
    logits, epsilon = args.beta * _delta(terms, args), args.label_smoothing
    won, lost = F.logsigmoid(logits), F.logsigmoid(-logits)
    return torch.sigmoid(logits) * (won - math.log1p(-epsilon)) + torch.sigmoid(-logits) * (
        lost - math.log(epsilon)
    )


def _nca_pair(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2402.05369."""
    chosen, rejected = (args.beta * ratios for ratios in terms.ratios)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2403.00409: unbiased if a share `label_smoothing` of the preferences is flipped."""
    logits, epsilon = args.beta * _delta(terms, args), args.label_smoothing
    return (-(1 - epsilon) * F.logsigmoid(logits) + epsilon * F.logsigmoid(-logits)) / (1 - 2 * epsilon)


def _bco_pair(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2404.04656, without its moving mean of rewards."""
    chosen, rejected = (args.beta * ratios for ratios in terms.ratios)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2405.00675, equation 4.7, with probabilities of 1 and 0."""
    chosen, rejected = terms.ratios
    return (chosen - 0.5 / args.beta) ** 2 + (rejected + 0.5 / args.beta) ** 2


def _smoothed(delta: Tensor, args: DPOConfig) -> Tensor:
    logits, epsilon = args.beta * delta, args.label_smoothing
    return -F.logsigmoid(logits) * (1 - epsilon) - F.logsigmoid(-logits) * epsilon


def _aot(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2406.05882, paired: the sorted margins of a micro-batch against those of the reference."""
    own = (terms.chosen - terms.rejected).sort(dim=0).values
    reference = (terms.ref_chosen - terms.ref_rejected).sort(dim=0).values
    return _smoothed(own - reference, args)


def _aot_unpaired(terms: PairTerms, args: DPOConfig) -> Tensor:
    chosen, rejected = (ratios.sort(dim=0).values for ratios in terms.ratios)
    return _smoothed(chosen - rejected, args)


def _apo_zero(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2408.06266, equation 7."""
    chosen, rejected = terms.ratios
    return 1 - torch.sigmoid(args.beta * chosen) + torch.sigmoid(args.beta * rejected)


def _apo_down(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2408.06266, equation 8."""
    chosen, rejected = terms.ratios
    return torch.sigmoid(args.beta * chosen) + 1 - torch.sigmoid(args.beta * (chosen - rejected))


def _discopop(terms: PairTerms, args: DPOConfig) -> Tensor:
    """arXiv:2406.08414, equation 5."""
    logits = args.beta * _delta(terms, args)
    share = torch.sigmoid(logits / args.discopop_tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


_LOSSES: dict[str, Callable[[PairTerms, DPOConfig], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}


# Two counts in one number, which the engine adds up over an update: pairs times this, and tokens. The sum is exact for
# 67 million pairs and as many tokens. An int: a tensor of ints divided by a float is of the default type, and single
# precision has 24 bits.
_TOKENS = 2**26


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
        return float(pairs * _TOKENS + chosen_tokens_in(batch))

    def divisors(self, terms: PairTerms, count: Tensor | int | None) -> tuple[Tensor | float, Tensor | float]:
        """What sums over pairs and sums over tokens are divided by: the counts of the update, or those of the batch if
        `count` is None or counts pairs alone.
        """
        if count is None or not self.is_scaled:
            return float(len(terms.chosen)), terms.chosen_tokens.sum().clamp(min=1)
        whole = torch.as_tensor(count)
        pairs = torch.div(whole, _TOKENS, rounding_mode="floor")
        return pairs, (whole - pairs * _TOKENS).clamp(min=1)

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
