"""Measures, on the first batch, what the model's own loss is a mean over. Names and signatures are not trusted.

Each question is answered by forwards of the bare model without gradients; everything is restored afterwards:

- *Is the first label of a row a target?* Keep only that one: a model that shifts its labels then has no target.
- *Is the loss a sum, a mean over targets, a mean over rows, or none of them?* Compare the loss of a batch with those of
  its halves.

A loss function of the user's is not called for this, because it may log, count and draw random numbers.

Answers are summed over ranks before they are judged: one rank's first batch may hold no target.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from windlass.core.logs import get_logger
from windlass.core.threads import said_if_long
from windlass.core.types import IGNORED, LossTerms
from windlass.engine.splitting import Halves, Kind, Split, closest, halves
from windlass.engine.undisturbed import undisturbed
from windlass.metrics.tokens import TargetCounter, comes_shifted

logger = get_logger(__name__)

Loss = Callable[[Any], Tensor | LossTerms]
SumOverRanks = Callable[[Tensor], Tensor]
# Far more than one rounding: the losses compared are sums over thousands of terms, in another order.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_LOW_PRECISION_ROUNDING = 2e-2
# Seconds that a rank without an answer waits for the others before it says why it has none.
PATIENCE = 10.0


def rounding_of(dtype: torch.dtype) -> float:
    """The largest difference between two ways to compute the same loss in this type, as a fraction of it."""
    return _ROUNDING.get(dtype, _LOW_PRECISION_ROUNDING)


class Probe:
    """Measurements on one prepared batch (already on its device).

    Args:
        module: the bare model; it is restored after each forward.
        sum_over_ranks: sums a host tensor over ranks; every rank asks the same questions in the same order.
    """

    def __init__(self, module: nn.Module, device: torch.device, sum_over_ranks: SumOverRanks) -> None:
        self._module, self._device, self._sum_over_ranks = module, device, sum_over_ranks
        # Of the last loss: some models of low precision compute theirs in fp32.
        self._loss_type = torch.float32
        self._failed: Exception | None = None

    def shifts_labels(self, batch: Any, counter: TargetCounter, loss: Loss) -> bool:
        """Return True if the first label of each row is not a target (a causal model that shifts by itself)."""
        only_first = _only_first_label(batch, counter)
        (voters,) = self._summed(float(only_first is not None))
        if not voters:
            return False
        vote = 0.0
        if only_first is not None:
            answer = self._value(loss, only_first)
            vote = float(not math.isfinite(answer) or answer == 0.0)
        elif batch is not None:
            self._value(loss, batch)  # if the model is sharded, the voters' forwards need this rank
        (votes,) = self._summed(vote)
        return votes * 2 > voters

    def counts_shifted(self, batch: Any, counter: TargetCounter, count: Callable[[Any], float]) -> bool:
        """Return True if `count`, a script's own, counts labels, and not the first one of each row: no forward is
        needed then to find out which labels are targets.
        """
        only_first = _only_first_label(batch, counter)
        vote = only_first is not None and count(only_first) == 0.0 < count(batch)
        votes, voters = self._summed(float(vote), float(only_first is not None))
        return 0 < votes == voters

    def splits(self, batch: Any, loss: Loss, counter: TargetCounter, rounding: float) -> Split:
        """How the batch's loss follows from those of its halves; `Split()` if that cannot be measured.

        Measured in evaluation mode, because dropout draws differently for halves. If the model has batch normalization,
        it is also measured in training mode, for `exact`.
        """
        parts = None if batch is None else halves(batch, counter)
        # A rank without a batch answers with the others, and has no vote.
        able, asked = self._summed(float(parts is not None), float(batch is not None))
        if able < asked or not able:
            return Split()
        split = self._split(parts, loss, rounding, train=False)
        if self._module.training and any(isinstance(part, _BatchNorm) for part in self._module.modules()):
            trained = self._split(parts, loss, rounding, train=True)
            if not trained.exact:
                return replace(split, deviation=trained.deviation, exact=False)
        return split

    def _split(self, parts: Halves | None, loss: Loss, rounding: float, train: bool) -> Split:
        votes = [] if parts is None else self._votes(parts, loss, train)
        usable = bool(votes) and all(map(math.isfinite, votes))
        size, *sums = self._summed(*(votes if usable else [0.0] * (len(Kind) + 1)))
        if size == 0.0:
            return Split()
        rounding = max(rounding, rounding_of(self._loss_type))
        return closest({kind: total / size for kind, total in zip(Kind, sums, strict=True)}, rounding)

    def _votes(self, parts: Halves, loss: Loss, train: bool) -> list[float]:
        """The size of the batch's loss, and its distance from what each kind makes of its halves."""
        whole, first, second = (self._part(loss, part, train) for part in (parts.whole, *parts.parts))
        return [abs(whole), *(abs(parts.predicted(kind, first, second) - whole) for kind in Kind)]

    def _part(self, loss: Loss, part: Any, train: bool) -> float:
        def in_mode(inputs: Any) -> Any:
            self._module.train(train)  # `_value` restores the modes
            return loss(inputs)

        try:
            return self._value(in_mode, part)
        except Exception as error:
            # The model returns no loss in evaluation mode, or does not accept a part of a batch. Ordinary: the model of
            # a pairwise or contrastive trainer accepts no batch. Who needs the answer reports that it is missing.
            logger.debug("the loss of a part of a batch cannot be measured: %r", error)
            self._failed = error
            return math.nan

    def value(self, batch: Any, loss: Loss) -> float:
        """The loss of the batch; NaN if it has none or the model does not accept it."""
        return self._part(loss, batch, self._module.training)

    def _summed(self, *values: float) -> list[float]:
        finite = [0.0 if math.isnan(value) else value for value in values]
        with self._named_if_alone():
            result: list[float] = self._sum_over_ranks(torch.tensor(finite, dtype=torch.float64)).tolist()
        return result

    @contextlib.contextmanager
    def _named_if_alone(self) -> Iterator[None]:
        """Around an exchange: if the model failed on this rank, and the others do not come, its error is why.

        Where ranks exchange tensors in their forwards, the others wait there for this one until `ddp_timeout`.
        """
        error, self._failed = self._failed, None
        if error is None:
            yield
            return
        said = "the model failed on the first batch of this process, and the other processes still compute theirs: %r"
        with said_if_long(PATIENCE, logger.error, said, error):
            try:
                yield
            except RuntimeError:  # the exchange failed
                raise error from None

    def _value(self, loss: Loss, batch: Any) -> float:
        with undisturbed(self._module, self._device):
            value = loss(dict(batch) if isinstance(batch, Mapping) else batch)
            loss_tensor = value.sum if isinstance(value, LossTerms) else value
            self._loss_type = loss_tensor.dtype
            return float(loss_tensor)


def _only_first_label(batch: Any, counter: TargetCounter) -> Any | None:
    labels = counter.labels(batch)
    if labels is None or labels.ndim != 2 or labels.shape[1] < 2 or comes_shifted(batch):
        return None
    valid = labels[labels != IGNORED]
    if valid.numel() == 0:
        return None
    masked = torch.full_like(labels, IGNORED)
    masked[:, 0] = valid[0]
    name = next(name for name in counter.label_names if batch.get(name) is not None)
    return {**batch, name: masked}
