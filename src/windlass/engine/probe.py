"""Finds out by experiment, on the first batch, what a loss is a mean over. Names and signatures are never trusted
for it.

Three questions, each answered by forwards without gradients, random generators and buffers put back afterwards:

- *Is the first label of a row a target?* Keep only that one: a model that shifts its labels is left with nothing to
predict.
- *Does the model, or the hook, divide by the denominator it is given?* Double it: the loss halves, or stays.
- *Does a hook that divides also multiply by the number of ranks, as hooks written for other trainers do?* Compare
with
  the loss it gives when it gets no denominator at all.

Answers are summed over ranks before they are judged: one rank's first batch may hold no target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.rng import preserved_rng
from windlass.core.types import LossTerms
from windlass.engine.normalise import Meaning
from windlass.metrics.tokens import IGNORE_INDEX, TargetCounter
from windlass.transforms.buffers import ForwardState

Loss = Callable[[Any, float | None], Tensor | LossTerms]
SumOverRanks = Callable[[Tensor], Tensor]
_TOLERANCE = 1e-2


class Probe:
    """Experiments on one prepared batch (already on its device).

    Args:
        module: the bare model; its buffers are restored after each forward.
        sum_over_ranks: sums a host tensor over ranks; every rank asks the same questions in the same order.
    """

    def __init__(self, module: nn.Module, device: torch.device, sum_over_ranks: SumOverRanks) -> None:
        self._module, self._device, self._sum_over_ranks = module, device, sum_over_ranks

    def shifts_labels(self, batch: Any, counter: TargetCounter, loss: Loss) -> bool:
        """Whether the first label of each row is no target (a causal model that shifts by itself)."""
        only_first = _only_first_label(batch, counter)
        (voters,) = self._summed(float(only_first is not None))
        if not voters:
            return False
        vote = 0.0
        if only_first is not None:
            answer = self._value(loss, only_first, None)
            vote = float(not math.isfinite(answer) or answer == 0.0)
        elif batch is not None:
            self._value(loss, batch, None)  # the voters' forwards need this rank where the model is sharded
        (votes,) = self._summed(vote)
        return votes * 2 > voters

    def divides(self, batch: Any, loss: Loss, denominator: float) -> bool | None:
        """True: the loss halves when the denominator doubles. False: it stays. None: neither."""
        once, twice = self._summed(
            self._value(loss, batch, denominator), self._value(loss, batch, 2 * denominator)
        )
        if _close(twice, once):
            return False
        return True if _close(2 * twice, once) else None

    def multiplies_by_ranks(self, batch: Any, loss: Loss, targets: float, world: int) -> bool | None:
        """For a hook that divides: whether it multiplies by the number of ranks too. None: can't be told."""
        with_count, alone = self._summed(
            self._value(loss, batch, max(targets, 1.0)) * float(targets > 0), self._value(loss, batch, None)
        )
        if _close(with_count, alone):
            return False
        return True if _close(with_count, alone * world) else None

    def _summed(self, *values: float) -> list[float]:
        finite = [0.0 if math.isnan(value) else value for value in values]
        result: list[float] = self._sum_over_ranks(torch.tensor(finite, dtype=torch.float64)).tolist()
        return result

    def _value(self, loss: Loss, batch: Any, denominator: float | None) -> float:
        before = ForwardState(self._module)
        with preserved_rng(self._device), torch.no_grad():
            try:
                value = loss(dict(batch) if isinstance(batch, Mapping) else batch, denominator)
            finally:  # a run that is told to leave right here saves what it has
                before.restore()
        return float(value.sum if isinstance(value, LossTerms) else value)


def hook_meaning(
    probe: Probe, batch: Any, loss: Loss, targets: float, denominator: float, world: int
) -> Meaning:
    """What an overridden `compute_loss` (or a `compute_loss_func`) that can take the denominator returns.

    Raises:
        ModelError: the loss neither halves nor stays when the denominator doubles, so its meaning must be declared.
    """
    divides = probe.divides(batch, loss, denominator)
    if divides is None:
        raise ModelError(
            "`compute_loss` mixes terms that are divided by `num_items_in_batch` with terms that are not, so no "
            "factor makes it exact under accumulation. Return `LossTerms(sum, weight, aux={...})`, or declare what "
            "it is with `loss_is_scaled_for_ga = True` (already normalised over the update and the ranks) or `False` "
            "(a plain mean)"
        )
    if not divides:
        return Meaning.MICRO_MEAN
    if world == 1:
        return Meaning.SHARE
    multiplies = probe.multiplies_by_ranks(batch, loss, targets, world)
    if multiplies is None:
        raise ModelError(
            "`compute_loss` divides by `num_items_in_batch`, but with the batch's own target count it does not give "
            f"the mean loss, nor {world} times it. Declare `loss_is_scaled_for_ga = True` if it is already "
            "normalised over the update and the ranks, or return `LossTerms(sum, weight)`"
        )
    return Meaning.SCALED if multiplies else Meaning.SHARE


def _only_first_label(batch: Any, counter: TargetCounter) -> Any | None:
    labels = counter.labels(batch)
    if labels is None or labels.ndim != 2 or labels.shape[1] < 2 or "shift_labels" in batch:
        return None
    valid = labels[labels != IGNORE_INDEX]
    if valid.numel() == 0:
        return None
    masked = torch.full_like(labels, IGNORE_INDEX)
    masked[:, 0] = valid[0]
    name = next(name for name in counter.label_names if batch.get(name) is not None)
    return {**batch, name: masked}


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-12)
