"""Cross entropy of a linear head without the logits of all targets in memory at once.

Logits are made for some targets at a time, and so are their gradients, in the forward: what lives on is one gradient of
the hidden states and one of the head. PyTorch's chunked `linear_cross_entropy` makes them in the same way, but has no
label smoothing, z-loss or soft-capping, and gives neither entropy nor accuracy, which here come from the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from windlass.core.errors import Problem, refuse
from windlass.core.tensors import autocast_dtype
from windlass.core.types import IGNORED
from windlass.transforms.tensor_split import TensorSplit

# Logits that are made at once: on a CPU as many as its caches hold, elsewhere as many as keep the device busy.
_AT_ONCE, _AT_ONCE_ON_DEVICES = 2**22, 2**26
_FEWEST = 128  # targets at once; matrix products of fewer rows are slow


@dataclass(frozen=True)
class LossOptions:
    """What is done to logits, and what is added to the loss.

    Attributes:
        scale: factor of the logits (Cohere, Granite).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2); None: they stay.
        label_smoothing: part of the target that is spread over all classes, from 0 to 1 (arXiv:1512.00567).
        z_loss: factor of the squared logarithm of the softmax's denominator (PaLM, arXiv:2204.02311).
        class_weights: weight of each class, shape (classes,), as in `torch.nn.functional.cross_entropy`.
        dynamic: weight each target with its own probability, which is not differentiated (dynamic fine-tuning,
            arXiv:2508.05629).
    """

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Tensor | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not 0.0 <= self.label_smoothing <= 1.0:
            problems.append(Problem("label_smoothing", self.label_smoothing, "use a number from 0 to 1"))
        if not self.z_loss >= 0.0:
            problems.append(Problem("z_loss", self.z_loss, "use 0 or more; 1e-4 is common"))
        refuse(problems)


class LinearLoss(NamedTuple):
    """Sums over the targets; each a scalar. Only `loss` is differentiable."""

    loss: Tensor  # in the logits' precision, single at least
    entropy: Tensor  # of the predicted distributions, in nats
    correct: Tensor  # targets that are predicted: the first class with the largest logit
    weight: Tensor  # of the targets: their number, or the sum of their class weights


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: LossOptions | None = None,
    split: TensorSplit | None = None,
) -> LinearLoss:
    """The summed cross entropy of `hidden @ weight.T + bias`.

    Args:
        hidden: shape (targets, size).
        weight: shape (classes, size).
        bias: shape (classes,).
        targets: int64, shape (targets,); -100 is left out.
        split: how the classes are divided among ranks, which have the same hidden states and targets: `weight` and
            `bias` are this rank's part. Collective. None: they are whole.

    Its gradients are made in the forward, and given away by a backward that does not keep the graph.
    """
    kind, dtype = hidden.device.type, autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        learning = torch.is_grad_enabled()
        fused: Any = _Fused  # `apply` has no types
        return LinearLoss(
            *fused.apply(hidden, weight, bias, targets, options or LossOptions(), split, learning)
        )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        split: TensorSplit | None,
        learning: bool,
    ) -> tuple[Tensor, ...]:
        needed = tuple(learning and wanted for wanted in ctx.needs_input_grad[:3])
        split = split or TensorSplit(len(weight))
        gradients = HeadGradients(hidden, weight, bias, needed, split)
        logits = ChunkLogits(weight, bias, options, split)
        sums = _Sums(hidden, logits, options, gradients)
        for rows in logits.chunks(len(targets)):
            sums.add(rows, targets[rows])
        ctx.gradients = gradients.made()
        results = sums.results
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the memory-lean loss was differentiated twice: its gradients are made in the forward and given away "
                "in the backward. Keep the graph (retain_graph=True), compute the loss again, or switch the "
                "memory-lean loss off."
            )
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        made = ctx.gradients
        if not kept:
            ctx.gradients = None
        return *(None if g is None else _times(g, gradient, kept) for g in made), None, None, None, None


def _times(tensor: Tensor, factor: Tensor, kept: bool) -> Tensor:
    """`tensor` times `factor`, a scalar; in place unless `tensor` is `kept`, so that no second copy of the
    weight's gradient exists.

    The factor keeps its precision. One over the number of targets, rounded to bfloat16, is off by up to 0.4 %, and with
    it the gradients of the whole model.
    """
    # Kernels of a CPU take a scalar in single precision, and would copy `tensor` for a vector. On a device a scalar
    # may be rounded to the dtype of `tensor`, a vector is not, and nothing is copied.
    exact = factor if factor.is_cpu else factor.reshape(1)
    return torch.mul(tensor, exact, out=torch.empty_like(tensor) if kept else tensor)


class ChunkSoftmax(NamedTuple):
    """The softmax of a chunk of targets, not yet divided by its denominators."""

    logits: Tensor  # shape (targets, classes), of this rank's classes
    shares: Tensor  # exp(logits - largest), of that shape
    largest: Tensor  # the largest logit of each target, over all classes
    real: Tensor  # the targets that are not left out
    here: Tensor  # those whose class is among this rank's; and where, in `places`
    places: Tensor
    behind: Tensor  # those behind a class of this rank's that has the largest logit, as two may in few bits

    def figures(self, split: TensorSplit, *more: Tensor) -> tuple[Tensor, ...]:
        """Of each target the sum of `shares`, its logit, and the sum of `shares` times logits, over all classes; if it
        is the class with the largest logit (the first one, as of `argmax`); and the sums over ranks of `more`, all in
        one exchange.
        """
        own = torch.where(self.here, self.logits.gather(1, self.places[:, None])[:, 0], 0)
        each = [self.shares.sum(dim=1), own, dot(self.shares, self.logits), self.behind.to(own), *more]
        total, chosen, expected, behind, *others = split.sum(torch.stack(each)).unbind()
        return total, chosen, expected, (chosen >= self.largest) & (behind == 0), *others


def dot(one: Tensor, other: Tensor) -> Tensor:
    """The scalar product of each row of one with that of the other."""
    # As a product of matrices: a product of vectors would be as large as both.
    return torch.bmm(one[:, None], other[:, :, None])[:, 0, 0]


def chunk_rows(targets: int, classes: int, *, on_cpu: bool) -> Iterator[slice]:
    """The rows of each chunk of `targets` targets. `classes`: those of a rank, the same number on every rank."""
    step = max(_FEWEST, (_AT_ONCE if on_cpu else _AT_ONCE_ON_DEVICES) // max(classes, 1))
    return (slice(start, start + step) for start in range(0, targets, step))


class ChunkLogits:
    """Logits of a linear head, for some targets at a time, in memory that the next ones use again.

    Args:
        weight: shape (classes, size).
        bias: shape (classes,), or None.
        options: `scale` and `softcap` are applied.
        split: of the classes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, options: LossOptions, split: TensorSplit) -> None:
        self._weight, self._bias, self._options, self.split = weight, bias, options, split
        self.precise = torch.promote_types(weight.dtype, torch.float32)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def chunks(self, targets: int) -> Iterator[slice]:
        """The rows of each chunk of `targets` targets."""
        return chunk_rows(targets, self.split.chunk, on_cpu=self._weight.is_cpu)

    def of(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of a chunk, shape (targets, classes), in single precision at least; and memory of their size."""
        if self._buffers is None:  # the first chunk is the largest
            shape = len(hidden), len(self._weight)
            self._buffers = tuple(hidden.new_empty(shape, dtype=self.precise) for _ in range(2))  # type: ignore[assignment]
            assert self._buffers is not None
        logits, memory = (buffer[: len(hidden)] for buffer in self._buffers)
        # In place where the product has the precision of the buffer; a product of halves is made in halves.
        if hidden.dtype == self.precise:
            torch.mm(hidden, self._weight.T, out=logits)
            if self._bias is not None:
                logits.add_(self._bias)
        else:  # rounded as the model's own head rounds them
            logits.copy_(torch.nn.functional.linear(hidden, self._weight, self._bias))
        if self._options.scale != 1.0:
            logits.mul_(self._options.scale)
        if self._options.softcap is not None:
            logits.div_(self._options.softcap).tanh_().mul_(self._options.softcap)
        return logits, memory

    def softmax(self, hidden: Tensor, targets: Tensor) -> ChunkSoftmax:
        """The softmax of a chunk, in the memory of its logits."""
        logits, shares = self.of(hidden)
        real = targets != IGNORED
        classes = torch.where(real, targets, 0)
        here, places = self.split.located(classes)
        own, first = logits.max(dim=1)
        largest = self.split.max(own.clone())
        behind = (own == largest) & (first + self.split.mine.start < classes)
        torch.sub(logits, largest[:, None], out=shares).exp_()
        return ChunkSoftmax(logits, shares, largest, real, here, places, behind)

    def back_through(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of what the head itself returns, but for the scale, in the memory of `gradient`, which is that
        of `logits`; these are overwritten.
        """
        if self._options.softcap is not None:
            gradient.mul_(logits.div_(self._options.softcap).square_().neg_().add_(1.0))
        return gradient


class HeadGradients:
    """Gradients of hidden states, weight and bias of a linear head, added up over chunks of targets.

    Args:
        hidden, weight, bias: the tensors.
        needed: which of them need a gradient.
        split: of the classes.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, ...],
        split: TensorSplit,
    ) -> None:
        self._own, self._split = (hidden, weight, bias), split
        precise = torch.promote_types(hidden.dtype, torch.float32)
        self.needed = any(needed)
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        # Sums of many products in half precision would lose the small ones.
        self._of_weight = torch.zeros_like(weight, dtype=precise) if needed[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=precise) if needed[2] and bias is not None else None

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """Add those of a chunk; `of_logits` is the gradient of what the head returns."""
        hidden, weight, _ = self._own
        of_logits = of_logits.to(hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(of_logits, weight, out=self._of_hidden[rows])
        if self._of_weight is not None:
            if self._of_weight.dtype == of_logits.dtype:
                self._of_weight.addmm_(of_logits.T, hidden[rows])
            else:
                self._of_weight.add_(of_logits.T @ hidden[rows])
        if self._of_bias is not None:
            self._of_bias.add_(of_logits.sum(dim=0))

    def made(self) -> tuple[Tensor | None, ...]:
        """The gradients in the dtypes of their tensors; None for those that are not needed."""
        if self._of_hidden is not None:
            self._split.sum(self._of_hidden)
        made = self._of_hidden, self._of_weight, self._of_bias
        return tuple(
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(made, self._own, strict=True)
        )


class _Sums:
    """The loss, the figures and the gradients, added up over chunks of targets."""

    def __init__(
        self, hidden: Tensor, logits: ChunkLogits, options: LossOptions, gradients: HeadGradients
    ) -> None:
        self._hidden, self._options, self._logits, self._gradients = hidden, options, logits, gradients
        self._split, precise = logits.split, logits.precise
        self.results = tuple(torch.zeros((), dtype=precise, device=hidden.device) for _ in range(4))
        weights = options.class_weights
        self._class_weights = None if weights is None else weights.to(hidden.device, precise)
        self._mine = slice(self._split.mine.start, self._split.mine.stop)

    def add(self, rows: slice, targets: Tensor) -> None:
        """Add those of a chunk, with its targets."""
        options = self._options
        softmax = self._logits.softmax(self._hidden[rows], targets)
        logits, shares, largest, real, here, places, _ = softmax
        total, chosen, expected, correct, smoothed = softmax.figures(self._split, self._smoothed(logits))
        log_total = largest + total.log()
        classes = torch.where(real, targets, 0)
        weight, of_total, of_chosen = self._factors(classes, chosen - log_total, log_total)
        losses = of_total[0] * log_total - of_chosen * chosen - smoothed + of_total[1] * log_total
        figures = (losses, log_total - expected / total, correct.to(losses), weight)
        for result, values in zip(self.results, figures, strict=True):
            result.add_(torch.where(real, values, 0).sum())
        if not self._gradients.needed:
            return
        # Factors of whole rows, all in one pass over the classes.
        kept = real.to(shares) * options.scale
        shares.mul_(((of_total[0] + 2 * of_total[1]) / total * kept)[:, None])
        shares.scatter_add_(1, places[:, None], -torch.where(here, of_chosen * kept, 0)[:, None])
        if options.label_smoothing:
            each = kept.new_ones(1) if self._class_weights is None else self._class_weights[self._mine]
            shares.addcmul_(kept[:, None], each, value=-options.label_smoothing / self._split.size)
        self._gradients.add(rows, self._logits.back_through(logits, shares))

    def _factors(
        self, classes: Tensor, log_share: Tensor, log_total: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Each target's weight; the factors of `log_total` in its loss (of the cross entropy, of the z-loss); and the
        factor of its logit.
        """
        options, smoothing = self._options, self._options.label_smoothing
        if self._class_weights is None:
            weight, mean = torch.ones_like(log_share), log_share.new_ones(())
        else:
            weight, mean = self._class_weights[classes], self._class_weights.mean()
        of_chosen = (1.0 - smoothing) * weight
        if options.dynamic:
            of_chosen = of_chosen * log_share.exp()
        return weight, (of_chosen + smoothing * mean, options.z_loss * log_total), of_chosen

    def _smoothed(self, logits: Tensor) -> Tensor:
        """The part of these logits in the smoothed loss, shape (targets,)."""
        spread = self._options.label_smoothing / self._split.size
        if not spread:
            return logits.new_zeros(len(logits))
        if self._class_weights is None:
            return logits.sum(dim=1) * spread
        return torch.mv(logits, self._class_weights[self._mine]) * spread
