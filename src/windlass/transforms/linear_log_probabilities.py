"""Log-probabilities of given tokens under a linear head, without the logits of all tokens in memory at once.

Logits are made for some tokens at a time, in the forward and again in the backward: which gradient each token gets
depends on all of them (a preference loss compares sums over answers), so none can be made in the forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from windlass.core.tensors import autocast_dtype
from windlass.core.types import IGNORED
from windlass.transforms.linear_cross_entropy import ChunkLogits, HeadGradients, LossOptions, dot
from windlass.transforms.tensor_split import TensorSplit


class TokenLogProbabilities(NamedTuple):
    """What is known about each target; shape (targets,), single precision at least. 0 for a target of -100.

    Only `log_probabilities` is differentiable.
    """

    log_probabilities: Tensor  # of the targets, in nats
    entropies: Tensor  # of the predicted distributions, in nats
    correct: Tensor  # 1 for a target that is predicted: the first class with the largest logit
    mean_logits: Tensor  # the mean over all classes
    # Log of the sum over classes of the squared probability (the weights of WPO, arXiv:2406.11827)
    log_collisions: Tensor


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    split: TensorSplit | None = None,
) -> TokenLogProbabilities:
    """The log-probability of each target under `softmax(hidden @ weight.T + bias)`.

    Memory beside the gradients is that of some targets' logits, whatever their number. Logits are rounded as the
    model's own head rounds them under autocast; the softmax is computed in single precision at least.

    Args:
        hidden: shape (targets, size).
        weight: shape (classes, size).
        bias: shape (classes,).
        targets: int64, shape (targets,); -100 is left out.
        scale: factor of the logits (Cohere, Granite).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2); None: they stay.
        split: of the classes, as in `linear_cross_entropy`.
    """
    options = LossOptions(scale=scale, softcap=softcap)
    dtype = autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        chosen: Any = _Chosen  # `apply` has no types
        return TokenLogProbabilities(
            *chosen.apply(hidden, weight, bias, targets, options, split or TensorSplit(len(weight)), dtype)
        )


def log_probabilities_of(logits: Tensor, targets: Tensor) -> TokenLogProbabilities:
    """The same from whole logits, for models whose logits are not those of a linear head.

    Args:
        logits: shape (..., classes).
        targets: int64, shape (...); -100 is left out.
    """
    real = targets != IGNORED
    logs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    with torch.no_grad():
        figures = (
            -(logs.exp() * logs).sum(dim=-1),
            (logits.argmax(dim=-1) == targets).to(logs),
            logits.to(logs).mean(dim=-1),
            (2 * logs).logsumexp(dim=-1),
        )
    chosen = logs.gather(-1, torch.where(real, targets, 0)[..., None])[..., 0]
    return TokenLogProbabilities(*(torch.where(real, values, 0) for values in (chosen, *figures)))


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        split: TensorSplit,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:
        states, matrix, offsets = _as_type(dtype, hidden, weight, bias)
        logits_of = ChunkLogits(matrix, offsets, options, split)
        results = [
            states.new_zeros(len(targets), dtype=logits_of.precise) for _ in TokenLogProbabilities._fields
        ]
        log_totals = torch.zeros_like(results[0])
        for rows in logits_of.chunks(len(targets)):
            log_totals[rows] = _add_chunk(results, rows, targets[rows], logits_of, states[rows])
        ctx.save_for_backward(hidden, weight, bias, targets, log_totals)
        ctx.options, ctx.split, ctx.dtype = options, split, dtype
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        hidden, weight, bias, targets, log_totals = ctx.saved_tensors
        # Cast again and not saved: the copies in half precision would live until the backward.
        states, matrix, offsets = _as_type(ctx.dtype, hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            logits_of = ChunkLogits(matrix, offsets, ctx.options, ctx.split)
            gradients = HeadGradients(states, matrix, offsets, ctx.needs_input_grad[:3], ctx.split)
            for rows in logits_of.chunks(len(targets)):
                logits, shares = logits_of.of(states[rows])
                real = targets[rows] != IGNORED
                here, places = ctx.split.located(torch.where(real, targets[rows], 0))
                torch.sub(logits, log_totals[rows, None], out=shares).exp_().neg_()
                shares.scatter_add_(1, places[:, None], here.to(logits)[:, None])
                outer = torch.where(real, gradient[rows], 0) * ctx.options.scale
                gradients.add(rows, logits_of.back_through(logits, shares).mul_(outer[:, None]))
        made = (
            None if found is None else found.to(own.dtype)
            for found, own in zip(gradients.made(), (hidden, weight, bias), strict=True)
        )
        return *made, None, None, None, None


def _as_type(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    return [tensor if tensor is None or dtype is None else tensor.to(dtype) for tensor in tensors]


def _add_chunk(
    results: list[Tensor], rows: slice, targets: Tensor, logits_of: ChunkLogits, states: Tensor
) -> Tensor:
    """Write the figures of a chunk into `results`; return the logarithms of the softmax's denominators."""
    softmax, split = logits_of.softmax(states, targets), logits_of.split
    logits, shares, largest, real = softmax[:4]
    more = dot(shares, shares), logits.sum(dim=1)
    total, chosen, expected, correct, squares, summed = softmax.figures(split, *more)
    log_total: Tensor = largest + total.log()
    figures = (
        chosen - log_total,
        log_total - expected / total,
        correct.to(logits),
        summed / split.size,
        squares.log() - 2 * total.log(),
    )
    for result, values in zip(results, figures, strict=True):
        result[rows] = torch.where(real, values, 0)
    return log_total
