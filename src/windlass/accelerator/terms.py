"""`LossTerms` in a loop that the user owns: sums of losses, divided by the weight of the whole update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.pace import Pace
from windlass.accelerator.prepared import Prepared
from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.dist.gang import Gang

_NARROW = (torch.bfloat16, torch.float16)


class TermsOfUpdate:
    """Divides the sums of one update's micro-batches by their weight over all processes.

    The weight is known at the last micro-batch only. Until then a guess stands for it (that of the update before), and
    the gradients are corrected once, after they were reduced. Nothing of it waits for the device.
    """

    def __init__(self, prepared: Prepared, gang: Gang, device: torch.device) -> None:
        self._prepared, self._gang, self._device = prepared, gang, device
        self._weight: Tensor | None = None
        self._guess: Tensor | None = None
        self._plain_seen = False

    def plain(self, last: bool) -> None:
        """A backward of a plain loss runs in this micro-batch.

        Raises:
            ModelError: the update has had `LossTerms`, which are divided differently.
        """
        if self._weight is not None:
            raise ModelError(_MIXED)
        self._plain_seen = not last

    def backward(self, terms: LossTerms, pace: Pace, kwargs: dict[str, Any]) -> None:
        """Gradients of `terms.sum`; after the last micro-batch they are those of sum / weight of the update.

        Raises:
            ModelError: auxiliary terms, a plain loss in the same update, or accumulation outside `accumulate`.
        """
        self._check(terms, pace)
        loader = pace.active_dataloader
        filler = loader is not None and loader.is_filler
        weight = self._weight_of(terms, filler)
        accumulates = self._weight is not None or not pace.sync_gradients
        self._weight = weight if self._weight is None else self._weight + weight
        guess = self._divisor(pace.num_steps if accumulates else 1)
        self._run(terms.sum, guess, filler, kwargs)
        if pace.sync_gradients:
            self._settle(pace.models, guess, accumulates)

    def _check(self, terms: LossTerms, pace: Pace) -> None:
        if terms.aux:
            raise ModelError(
                "LossTerms(aux=...) is for the Trainer: in a loop of your own, put auxiliary terms into the sum, "
                "times the weight they are to have"
            )
        if self._plain_seen:
            raise ModelError(_MIXED)
        if pace.num_steps > 1 and not pace.models:
            raise ModelError("LossTerms are accumulated within `with accelerator.accumulate(model):` only")

    def _weight_of(self, terms: LossTerms, filler: bool) -> Tensor:
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        if isinstance(terms.weight, Tensor):
            weight = terms.weight.detach().to(self._device, dtype)
        else:  # written by the device itself: a copy from the host may wait
            weight = torch.full((), float(terms.weight), dtype=dtype, device=self._device)
        return weight * 0.0 if filler else weight

    def _divisor(self, micro_batches: int) -> Tensor:
        """What this micro-batch's sum is divided by for now; the same on every process and in the whole update."""
        assert self._weight is not None
        if micro_batches == 1:
            self._guess = _above_zero(self._gang.sum_on_device(self._weight.clone()))
        elif self._guess is None:
            self._guess = _above_zero(self._gang.sum_on_device(self._weight.clone()) * micro_batches)
        return self._guess

    def _run(self, total: Tensor, guess: Tensor, filler: bool, kwargs: dict[str, Any]) -> None:
        if filler:
            total = torch.nan_to_num(total, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
        if total.dtype in _NARROW:
            total = total.float()
        loss: Any = self._prepared.scaler.scale(total * (self._gang.size / guess).to(total.dtype))
        loss.backward(**kwargs)

    def _settle(self, models: Sequence[nn.Module], guess: Tensor, accumulated: bool) -> None:
        """The update's gradients are complete: divide them by its true weight."""
        assert self._weight is not None
        if accumulated:
            true = _above_zero(self._gang.sum_on_device(self._weight))
            self._correct(models, guess / true)
            self._guess = true
        self._weight = None

    def _correct(self, models: Sequence[nn.Module], factor: Tensor) -> None:
        for model in models:
            strategy = self._prepared.strategy_of(model)
            parameters = model.parameters()
            gradients = [p.grad for p in parameters if p.grad is not None]
            local = gradients if strategy is None else strategy.local(gradients)
            if local:
                torch._foreach_mul_(local, factor.to(torch.promote_types(local[0].dtype, torch.float32)))


_MIXED = (
    "one update was given LossTerms in one micro-batch and a plain loss in another: they are divided by different "
    "things. Use one of the two"
)


def _above_zero(weight: Tensor) -> Tensor:
    """Without any weight there is nothing to divide by."""
    return torch.where(weight > 0, weight, torch.ones_like(weight))
