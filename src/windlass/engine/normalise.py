"""Normalising losses: the meaning of a micro-batch's loss, and the factor that makes it its share of the update's loss.

Every strategy averages gradients over ranks, so the loss passed to `Executor.backward` is this rank's share times the
number of ranks. Everything else in Windlass uses shares.

`Normaliser` has two modes. A run of the Trainer has counted the whole update before its first backward
(`UpdateNormaliser`); a loop of the user's own gets one micro-batch at a time (`LoopNormaliser`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from windlass.core import host
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.types import LossTerms, State
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import Executor

logger = get_job_logger(__name__)

_SEVERAL = (
    "`training_step` calls backward several times for one micro-batch: the loss in the logs is the sum of all that it "
    "passes to backward, not what it returns"
)

_NARROW = (torch.bfloat16, torch.float16)


class Meaning(Enum):
    """The meaning of the value that `compute_loss` returned."""

    MICRO_MEAN = "the mean over this micro-batch's targets"
    SHARE = "this micro-batch's share of the update's loss"
    SCALED = "a share, already multiplied by the number of ranks: no further factor"


class Normaliser:
    """Scales the losses of micro-batches for backward. Subclasses are its two modes.

    The weight of an update's `LossTerms` is complete only with its last micro-batch. Until then an estimate is used,
    and the gradients are corrected once.

    Args:
        ranks: number of ranks with different targets, whose gradients are averaged.
        sum_on_device: sums a tensor over those ranks, in place.

    Attributes:
        weight: that of the `LossTerms` of the micro-batches so far on this rank; None if there were none.
    """

    def __init__(self, ranks: int, sum_on_device: Callable[[Tensor], Tensor] = lambda value: value) -> None:
        self.ranks, self._sum_on_device = ranks, sum_on_device
        self.weight: Tensor | None = None

    def _add_weight(self, terms: LossTerms, filler: bool) -> None:
        """Add the weight of a micro-batch; 0 for a filler. Never waits for the device."""
        device = terms.sum.device
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(terms.weight, Tensor):
            weight = terms.weight.detach().to(device, dtype)
        else:  # written by the device itself: a copy from the host may wait
            weight = torch.full((), float(terms.weight), dtype=dtype, device=device)
        weight = torch.zeros_like(weight) if filler else weight
        self.weight = weight if self.weight is None else self.weight + weight

    def _weight_of_ranks(self, micro_batches: int = 1, otherwise: float = 1.0) -> Tensor:
        """The sum over ranks, times `micro_batches`; `otherwise` if it is 0, because it is a divisor. Collective.

        Raises ModelError if it is negative, infinite or NaN. On a device, for which the host must not wait, it is NaN
        then, and so is the loss.
        """
        assert self.weight is not None
        total = self._sum_on_device(self.weight.clone())
        total = total if micro_batches == 1 else total * micro_batches
        if total.is_cpu and not 0 <= host.read(total) < math.inf:
            raise ModelError(
                f"the weights of the LossTerms of this update add up to {host.read(total)} over all ranks: a weight is "
                "a number of targets, or the sum of their weights, which is finite and not negative"
            )
        # Written by the device itself, as the weights are.
        divisor = torch.where((total >= 0) & (total < math.inf), total, torch.full_like(total, math.nan))
        return torch.where(total == 0, torch.full_like(total, otherwise), divisor)


class UpdateNormaliser(Normaliser):
    """The mode of a run, whose updates are counted before their first backward; sums this rank's shares.

    `scope` starts a micro-batch, `backward` takes the loss that the user's code passes to `accelerator.backward`.

    Attributes:
        meaning: of a plain loss.
        watchers: called with each loss that is passed to `backward`.
        divided_by: the number of micro-batches, if a script has divided the present loss by it.
        denominator: targets of the update over all ranks; 1 without any, because it is a divisor.
        targets: of the present micro-batch.
        last, filler: the present micro-batch is the last one of its update; it has no weight.
        share: this rank's share of the loss that the present micro-batch has passed to `backward`; None before it has.
        parts: named auxiliary losses of the update, this rank's share.
    """

    def __init__(
        self,
        ranks: int,
        meaning: Meaning = Meaning.MICRO_MEAN,
        sum_on_device: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        super().__init__(ranks, sum_on_device)
        self.meaning = meaning
        self.watchers: tuple[Callable[[Any], None], ...] = ()
        self.divided_by = 1
        self.denominator, self.targets, self._share_of_samples = 1.0, 0.0, 0.0
        self.last, self.filler, self._empty = True, False, False
        self.share: Tensor | None = None
        self.parts: dict[str, Tensor] = {}
        self._plain_seen = False
        self._aux_loss: Tensor | None = None
        self._waiting: Tensor | None = None
        self._total: Tensor | None = None

    def scope(self, update: UpdateBatch, index: int) -> None:
        """Start micro-batch `index` of an update, and with the first one the update."""
        self.divided_by = 1
        if index == 0:
            self.denominator = update.denominator or 1.0
            self._aux_loss = self._waiting = self._total = self.weight = None
            self._plain_seen = False
            if self.parts:
                self.parts = {}
        samples, total = update.samples[index], update.total_samples
        self.filler, self._share_of_samples = total > 0 and samples == 0, samples / max(total, 1.0)
        self.targets, self.last = update.targets[index], index == len(update.batches) - 1
        self.share, self._empty = None, not self.targets

    @property
    def weighs_rows(self) -> bool:
        """The present micro-batch has the same share of the update's targets and of its samples."""
        return math.isclose(self.targets / self.denominator, self._share_of_samples)

    def backward(self, loss: Tensor | LossTerms, executor: Executor, **options: Any) -> None:
        """Compute the gradients of a micro-batch's loss; `options` are those of `Tensor.backward`."""
        for watch in self.watchers:
            watch(loss)
        scaled = self._terms(loss) if isinstance(loss, LossTerms) else self._plain(loss)
        share = _account(scaled, self.ranks)
        if self.last and self._waiting is not None:
            share, self._waiting = share + self._waiting * self.correction, None
        if self.share is None:
            self.share = share
        else:
            warn_once(logger, _SEVERAL)
            self.share = self.share + share
        if self.parts:
            # Auxiliary terms of all micro-batches but the last have a backward of their own; see `_auxiliary`.
            aux, self._aux_loss = self._aux_loss, None
            if aux is not None:
                executor.backward_aux(aux)
            elif self.last:
                executor.add_aux(self.correction)
        executor.backward(scaled, **options)

    def note_loss(self, loss: Tensor) -> None:
        """Count `loss`, of the only micro-batch on the only rank, whose gradients the step computed by itself."""
        self.share = _account(loss, self.ranks)

    def _plain(self, loss: Tensor) -> Tensor:
        if self.weight is not None:
            raise ModelError(_MIXED)
        self._plain_seen = True
        factor = float(self.ranks) if self.meaning is Meaning.SHARE else 1.0
        if self.filler:
            factor = 0.0
        elif self.meaning is Meaning.MICRO_MEAN:
            # A micro-batch without targets may still have a sum over other positions; a mean over targets is NaN.
            loss = _finite(loss) if self._empty else loss
            factor = self.targets / self.denominator * self.ranks
        factor *= self.divided_by
        return loss if factor == 1.0 else _weigh(loss, factor)

    def _terms(self, terms: LossTerms) -> Tensor:
        if self._plain_seen:
            raise ModelError(_MIXED)
        if self._total is not None and self.parts:
            raise ModelError(
                "a training step passed LossTerms to `self.accelerator.backward` again after auxiliary terms: add up "
                "the sums, the weights and the terms, and pass them once"
            )
        total = _weigh(terms.sum, 0.0 if self.filler else self.ranks / self.denominator)
        self._add_weight(terms, self.filler)
        if self.last and self.ranks > 1:
            # Before the backward on all ranks, also those whose batch has no auxiliary terms: the others need the
            # total there, and its exchange must not meet those of gradients.
            self._total = self._weight_of_ranks(otherwise=self.denominator)
        if not terms.aux:
            return total
        terms.check_names()
        return total + self._auxiliary(terms.aux)

    def _auxiliary(self, terms: dict[str, Tensor]) -> Tensor | float:
        """The part of the auxiliary terms in the present backward.

        The whole update is divided by the estimated weight, and corrected once the true one is known, which must not
        change auxiliary terms. In the last micro-batch the true weight is known, and they are divided by the correction
        in advance. In earlier ones it is not: their gradients are kept separately until it is.
        """
        mean: Tensor | float = 0.0
        for name, value in terms.items():
            scaled = _weigh(value, 0.0 if self.filler else self._share_of_samples * self.ranks)
            mean = mean + scaled
            share = _account(scaled, self.ranks)
            self.parts[name] = self.parts[name] + share if name in self.parts else share
        assert isinstance(mean, Tensor)
        if self.last:
            return mean * self.correction.to(mean.dtype)
        self._aux_loss = mean
        share = _account(mean, self.ranks)
        self._waiting = share if self._waiting is None else self._waiting + share
        return 0.0

    @property
    def total(self) -> Tensor | None:
        """The weight of all `LossTerms` of the update over all ranks, None if there are none. Collective."""
        if self._total is None and self.weight is not None:
            # Without any weight there is nothing to correct.
            self._total = self._weight_of_ranks(otherwise=self.denominator)
        return self._total

    @property
    def correction(self) -> Tensor:
        """True weight of the update / the estimated one. Collective."""
        total = self.total
        assert total is not None, "only LossTerms have auxiliary terms"
        return total / self.denominator


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The micro-batch whose loss a loop of the user's own passes to backward."""

    of_update: int  # micro-batches of an update
    last: bool  # it completes its update
    # `here`, `everywhere`: its samples on this rank and over all ranks; None if that is not known
    here: int | None = None
    everywhere: int | None = None
    accumulates: bool = False  # the loop named the models that it accumulates into

    @property
    def filler(self) -> bool:
        """True if it only runs along with other ranks' batches, without weight."""
        return self.here == 0


class LoopNormaliser(Normaliser):
    """The mode of a loop that the user owns, which gets one micro-batch at a time.

    A plain loss is the mean over its batch's samples: it is divided by the micro-batches of an update and weighted by
    this rank's share of the samples. `LossTerms` are divided by the weight of the update, which is known only at its
    last micro-batch. Until then the weight of the previous update is used as an estimate, and the gradients are
    corrected once, after they were reduced. This never waits for the device.
    """

    def __init__(self, ranks: int, sum_on_device: Callable[[Tensor], Tensor]) -> None:
        super().__init__(ranks, sum_on_device)
        self._micro = MicroBatch(1, last=True)
        # That of the previous update. A number after it was loaded, until a loss shows the device.
        self._guess: Tensor | float | None = None
        self._correction: Tensor | None = None
        self._plain_seen = False

    def scope(self, micro: MicroBatch) -> None:
        self._micro = micro

    def apply(self, loss: Tensor | LossTerms) -> Tensor:
        """The scalar to run backward on: this rank's share times the number of ranks."""
        return self._terms(loss) if isinstance(loss, LossTerms) else self._plain(loss)

    def correction(self) -> Tensor | None:
        """The factor that makes the gradients those of the true weight, once they are complete; None if they are.

        Called after every backward.
        """
        factor, self._correction = self._correction, None
        return factor

    def state_dict(self) -> State:
        """The estimated divisor of the next update: with another one its sums would have other bits."""
        return {"terms_weight": None if self._guess is None else float(self._guess)}

    def load_state_dict(self, state: State) -> None:
        self.weight, self._correction, self._plain_seen = None, None, False  # of an update that is abandoned
        self._guess = state.get("terms_weight")  # earlier versions did not save it

    def _plain(self, loss: Tensor) -> Tensor:
        micro = self._micro
        if self.weight is not None:
            raise ModelError(_MIXED)
        self._plain_seen = not micro.last
        share = loss if micro.of_update == 1 else loss / micro.of_update
        if micro.filler:
            return _weigh(share, 0.0)
        if micro.here is None or micro.everywhere is None or micro.here * self.ranks == micro.everywhere:
            return share
        return share * (micro.here * self.ranks / micro.everywhere)

    def _terms(self, terms: LossTerms) -> Tensor:
        micro = self._micro
        self._check(terms, micro)
        accumulates = self.weight is not None or not micro.last
        self._add_weight(terms, micro.filler)
        guess = self._divisor(micro.of_update if accumulates else 1)
        total = _weigh(terms.sum, 0.0) if micro.filler else terms.sum
        total = total.float() if total.dtype in _NARROW else total
        if micro.last:
            self._settle(guess, accumulates)
        return total * (self.ranks / guess).to(total.dtype)

    def _check(self, terms: LossTerms, micro: MicroBatch) -> None:
        if terms.aux:
            raise ModelError(
                "LossTerms(aux=...) is for the Trainer: in a loop of your own, put auxiliary terms into the sum, times "
                "their weight"
            )
        if self._plain_seen:
            raise ModelError(_MIXED)
        if micro.of_update > 1 and not micro.accumulates:
            raise ModelError("LossTerms are accumulated within `with accelerator.accumulate(model):` only")

    def _divisor(self, micro_batches: int) -> Tensor:
        """The estimated divisor of this micro-batch's sum; the same on every rank and in the whole update."""
        if micro_batches == 1 or self._guess is None:
            self._guess = self._weight_of_ranks(micro_batches)
        elif not isinstance(self._guess, Tensor):
            assert self.weight is not None
            self._guess = torch.full_like(self.weight, self._guess)
        return self._guess

    def _settle(self, guess: Tensor, accumulated: bool) -> None:
        """Called once the weight of the update is complete."""
        if accumulated:
            true = self._weight_of_ranks()
            self._guess, self._correction = true, guess / true
        self.weight = None


_MIXED = "one update was given LossTerms and a plain loss, which have different divisors. Use one of the two"


def _account(scaled: Tensor, ranks: int) -> Tensor:
    """This rank's share, to be summed: sums of bf16 or fp16 numbers would lose their last digits."""
    share = scaled.detach()
    if share.ndim:  # a loss of one element may have any shape
        share = share.reshape(())
    if share.dtype in _NARROW:
        share = share.float()
    return share / ranks if ranks > 1 else share


def _weigh(loss: Tensor, factor: float) -> Tensor:
    """`loss * factor`, where a factor of zero gives zero even for a mean over no targets, which is NaN."""
    return _finite(loss) * 0.0 if factor == 0.0 else loss * factor


def _finite(loss: Tensor) -> Tensor:
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
