"""Who divides: what the loss of a micro-batch means, and the factor that makes it its share of the update's loss.

Every strategy averages gradients over ranks, so the loss handed to `Executor.backward` is this rank's share times the
number of ranks. Everything else in Windlass speaks of shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms

_NARROW = (torch.bfloat16, torch.float16)


class Meaning(Enum):
    """What `compute_loss` returned."""

    MICRO_MEAN = "the mean over this micro-batch's targets"
    SHARE = "the sum over this micro-batch's targets, divided by the update's denominator"
    SCALED = "a share, already multiplied by the number of ranks: no further factor"


@dataclass(slots=True)
class Normaliser:
    """Turns the losses of one update's micro-batches into what goes to backward, and keeps the account.

    `begin` starts an update, `scope` a micro-batch; `apply` maps the loss that the user's code hands to backward.
    """

    world: int
    meaning: Meaning = Meaning.MICRO_MEAN
    denominator: float = 1.0
    targets: float = 0.0
    share_of_samples: float = 0.0
    calls: int = 0
    loss: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    weight: Tensor | None = None
    filler: bool = False
    sum_on_device: Callable[[Tensor], Tensor] = lambda value: value
    last: bool = True
    judge: Callable[[Tensor | LossTerms], None] | None = None
    apart: Tensor | None = None
    _waiting: Tensor | None = None
    _total: Tensor | None = None

    def begin(self, denominator: float, filler: bool) -> None:
        """Start an update: `denominator` is its weight over all ranks; a `filler` weighs nothing."""
        self.denominator, self.filler = max(denominator, 1e-30), filler
        self.weight = self.apart = self._waiting = self._total = None
        if self.parts:
            self.parts = {}

    def scope(
        self, targets: float, share_of_samples: float, last: bool = True, filler: bool | None = None
    ) -> None:
        """Start a micro-batch with this many targets, and this fraction of the update's samples; whether it is a
        `filler`, where that is not what the update as a whole is.
        """
        self.targets, self.share_of_samples, self.last = targets, share_of_samples, last
        self.filler = self.filler if filler is None else filler
        self.calls, self.loss = 0, None

    def apply(self, loss: Tensor | LossTerms) -> Tensor:
        """The scalar to run backward on: this rank's share times the number of ranks."""
        self.calls += 1
        if self.judge is not None:  # the first loss of a script's own function tells what it means
            self.judge(loss)
        if isinstance(loss, LossTerms):
            scaled = self._terms(loss)
        elif self.filler:
            scaled = _weigh(loss, 0.0)
        elif self.meaning is Meaning.MICRO_MEAN:
            scaled = _weigh(loss, self.targets / self.denominator * self.world)
        elif self.meaning is Meaning.SHARE:
            scaled = loss * self.world if self.world > 1 else loss
        else:
            scaled = loss
        share = _account(scaled, self.world)
        if self.last and self._waiting is not None:
            share, self._waiting = share + self._waiting * self.correction, None
        self.loss = share if self.loss is None else self.loss + share
        return scaled

    def _terms(self, terms: LossTerms) -> Tensor:
        factor = 0.0 if self.filler else self.world / self.denominator
        total = _weigh(terms.sum, factor)
        weight = torch.as_tensor(
            terms.weight, dtype=torch.float64 if terms.sum.device.type != "mps" else None
        )
        weight = weight.detach().to(terms.sum.device) * (0.0 if self.filler else 1.0)
        if self._total is not None:
            raise ModelError(
                "a training step handed LossTerms to `self.accelerator.backward` again after auxiliary terms: add the "
                "sums, the weights and the terms up, and hand them over once"
            )
        self.weight = weight if self.weight is None else self.weight + weight
        return total + self._auxiliary(terms.aux) if terms.aux else total

    def _auxiliary(self, terms: dict[str, Tensor]) -> Tensor | float:
        """What auxiliary terms add to the loss that goes to backward now.

        The whole update is divided by the guessed weight, and corrected once the true one is known; auxiliary terms
        must come out of that as they were. In the last micro-batch the true weight is known, and the correction is
        undone beforehand. In earlier ones it is not: their gradients are kept `apart` until it is.
        """
        mean: Tensor | float = 0.0
        for name, value in terms.items():
            scaled = _weigh(value, 0.0 if self.filler else self.share_of_samples * self.world)
            mean = mean + scaled
            share = _account(scaled, self.world)
            self.parts[name] = self.parts[name] + share if name in self.parts else share
        assert isinstance(mean, Tensor)
        if self.last:
            return mean * self.correction.to(mean.dtype)
        self.apart = mean
        share = _account(mean, self.world)
        self._waiting = share if self._waiting is None else self._waiting + share
        return 0.0

    def take_apart(self) -> Tensor | None:
        """The auxiliary loss of this micro-batch whose gradients are to be kept apart, once."""
        apart, self.apart = self.apart, None
        return apart

    @property
    def total(self) -> Tensor | None:
        """The weight of all `LossTerms` of the update over all ranks, None where there are none. Collective."""
        if self._total is None and self.weight is not None:
            total = self.sum_on_device(self.weight.clone())
            # Without any weight there is nothing to correct.
            self._total = torch.where(total > 0, total, torch.full_like(total, self.denominator))
        return self._total

    @property
    def correction(self) -> Tensor:
        """True weight of the update / the guessed one. Collective."""
        total = self.total
        assert total is not None, "only LossTerms have auxiliary terms"
        return total / self.denominator

    def take(self) -> Tensor:
        """This rank's share of the loss of the micro-batch that has just run.

        Raises:
            ModelError: nothing was handed to backward.
        """
        if self.loss is None:
            raise ModelError(
                "the training step returned without calling `self.accelerator.backward(loss)`. A raw "
                "`loss.backward()` goes past accumulation, loss scaling and the reduction over ranks: replace it, or "
                "call `super().training_step(...)`"
            )
        return self.loss


def _account(scaled: Tensor, world: int) -> Tensor:
    """This rank's share, for the account: sums of bf16 or fp16 numbers would lose their last digits."""
    share = scaled.detach()
    if share.dtype in _NARROW:
        share = share.float()
    return share / world if world > 1 else share


def _weigh(loss: Tensor, factor: float) -> Tensor:
    """`loss * factor`, where a factor of zero gives zero even for a mean over no targets, which is NaN."""
    if factor == 1.0:
        return loss
    if factor == 0.0:
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
    return loss * factor
