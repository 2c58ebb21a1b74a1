"""How the loss of a batch follows from the losses of its halves: the arithmetic, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from windlass.core.types import IGNORED
from windlass.metrics.tokens import TargetCounter, comes_shifted, rows


class Kind(Enum):
    """How the loss of a batch is computed from the losses of its halves."""

    TARGETS = "their mean, weighted by the numbers of targets"
    ROWS = "their mean, weighted by the numbers of rows"
    SUM = "their sum"


@dataclass(frozen=True, slots=True)
class Split:
    """Result of a measurement."""

    kind: Kind = Kind.TARGETS  # the closest kind
    # Its distance from the loss of the whole, as a fraction of it; None if nothing could be measured
    deviation: float | None = None
    exact: bool = True  # the deviation is within rounding


@dataclass(frozen=True, slots=True)
class Halves:
    """A batch and its two parts, with their numbers of targets and rows.

    A batch of one row is doubled: the whole is that row twice.
    """

    whole: Any
    parts: tuple[Any, Any]
    targets: tuple[float, float]
    rows: tuple[int, int]

    def predicted(self, kind: Kind, first: float, second: float) -> float:
        """The loss of the whole, if the loss is of this kind."""
        if kind is Kind.SUM:
            return first + second
        one, two = self.targets if kind is Kind.TARGETS else self.rows
        # The mean over no targets is NaN, and has no weight.
        return ((first * one if one else 0.0) + (second * two if two else 0.0)) / ((one + two) or 1)


def halves(batch: Any, counter: TargetCounter) -> Halves | None:
    """Split a batch along its first axis; None if a tensor or list in it has another length there."""
    count = rows(batch)
    if not count or not _divisible(batch, count):
        return None
    if count == 1:
        whole, parts, sizes = _mapped(batch, _doubled), (batch, batch), (1, 1)
    else:
        middle = count // 2
        sizes = (middle, count - middle)
        whole = _with_unequal_targets(batch, counter, middle, count)
        parts = (_part(whole, slice(0, middle)), _part(whole, slice(middle, count)))
    return Halves(whole, parts, (counter(parts[0]), counter(parts[1])), sizes)


def closest(deviations: Mapping[Kind, float], rounding: float) -> Split:
    """The kind that fits best; targets are preferred if rounding hides the difference, or if none fits."""
    least = min(deviations.values())
    # Ten times the least: kinds that are all within rounding are not ordered by chance.
    noise = min(max(10 * least, rounding / 10), rounding)
    fitting = [kind for kind in Kind if deviations[kind] <= noise]
    best = fitting[0] if fitting else Kind.TARGETS
    return Split(best, deviations[best], bool(fitting))


def _divisible(batch: Any, count: int) -> bool:
    if isinstance(batch, Mapping):
        leaves = list(batch.values())
    else:
        leaves = list(batch) if type(batch) in (list, tuple) else [batch]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]
    same = all(leaf.ndim == 0 or len(leaf) == count for leaf in tensors)
    return bool(tensors) and same and all(type(leaf) is list and len(leaf) == count for leaf in others)


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {name: change(leaf) for name, leaf in batch.items()}
    return type(batch)(map(change, batch)) if type(batch) in (list, tuple) else change(batch)


def _has_rows(leaf: Any) -> bool:
    return type(leaf) is list or (isinstance(leaf, Tensor) and leaf.ndim > 0)


def _part(batch: Any, part: slice) -> Any:
    return _mapped(batch, lambda leaf: leaf[part] if _has_rows(leaf) else leaf)


def _doubled(leaf: Any) -> Any:
    if not _has_rows(leaf):
        return leaf
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf * 2


def _with_unequal_targets(batch: Any, counter: TargetCounter, middle: int, count: int) -> Any:
    """The batch, with fewer targets in its first row if both halves have equally many for each row.

    Otherwise a mean over rows would equal one over targets.
    """
    first, second = (counter(_part(batch, part)) for part in (slice(0, middle), slice(middle, count)))
    labels, equal = counter.labels(batch), first * (count - middle) == second * middle
    if labels is None or labels.ndim != 2 or not equal or comes_shifted(batch):
        return batch
    valid = (labels[0] != IGNORED).nonzero().flatten().tolist()
    if len(valid) < 4:  # half of them must be enough to change the loss visibly
        return batch
    labels = labels.clone()
    labels[0, valid[len(valid) // 2] :] = IGNORED
    name = next(name for name in counter.label_names if batch.get(name) is not None)
    return {**batch, name: labels}
