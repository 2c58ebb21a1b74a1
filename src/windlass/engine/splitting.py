"""Whether the loss of a batch follows from the losses of its halves, and how: the arithmetic, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from windlass.metrics.tokens import IGNORE_INDEX, TargetCounter, rows


class Kind(Enum):
    """How the losses of two halves make the loss of the whole."""

    TARGETS = "their mean, weighted by the numbers of targets"
    ROWS = "their mean, weighted by the numbers of rows"
    SUM = "their sum"


@dataclass(frozen=True, slots=True)
class Split:
    """What was measured.

    Attributes:
        kind: the kind that came closest.
        deviation: how far it is from the loss of the whole, as a fraction of it; None if nothing could be measured.
        exact: whether that is within rounding.
        fitting: all kinds that this batch cannot tell from the closest.
    """

    kind: Kind = Kind.TARGETS
    deviation: float | None = None
    exact: bool = True
    fitting: frozenset[Kind] = frozenset(Kind)


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
        # The mean over no targets is NaN, and counts nothing.
        return ((first * one if one else 0.0) + (second * two if two else 0.0)) / ((one + two) or 1)


def halves(batch: Any, counter: TargetCounter) -> Halves | None:
    """A batch split along its first axis; None if it cannot be: a tensor or list in it has another length there."""
    count = rows(batch)
    if not count or not _divisible(batch, count):
        return None
    if count == 1:
        whole, parts, sizes = _joined(batch), (batch, batch), (1, 1)
    else:
        middle = count // 2
        sizes = (middle, count - middle)
        whole = _unlike(batch, counter, middle, count)
        parts = (_cut(whole, slice(0, middle), count), _cut(whole, slice(middle, count), count))
    return Halves(whole, parts, (counter(parts[0]), counter(parts[1])), sizes)


def closest(deviations: Mapping[Kind, float], rounding: float) -> Split:
    """The kind that fits best; targets are preferred if rounding cannot tell them from another, or if none fits."""
    least = min(deviations.values())
    noise = min(max(10 * least, rounding / 10), rounding)
    fitting = frozenset(kind for kind, value in deviations.items() if value <= noise)
    best = next((kind for kind in Kind if kind in fitting), Kind.TARGETS)
    return Split(best, deviations[best], bool(fitting), fitting)


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if type(batch) in (list, tuple) else [batch]


def _divisible(batch: Any, count: int) -> bool:
    tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
    others = [
        leaf for leaf in _leaves(batch) if not isinstance(leaf, Tensor | bool | int | float | str | None)
    ]
    same = all(leaf.ndim == 0 or len(leaf) == count for leaf in tensors)
    return bool(tensors) and same and all(type(leaf) is list and len(leaf) == count for leaf in others)


def _mapped(batch: Any, change: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: change(leaf) for name, leaf in batch.items()}
    return type(batch)(map(change, batch)) if type(batch) in (list, tuple) else change(batch)


def _cut(batch: Any, part: slice, count: int) -> Any:
    def cut(leaf: Any) -> Any:
        whole = type(leaf) is list or (isinstance(leaf, Tensor) and leaf.ndim > 0)
        return leaf[part] if whole else leaf

    return _mapped(batch, cut)


def _joined(batch: Any) -> Any:
    def twice(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.cat([leaf, leaf]) if leaf.ndim else leaf
        return leaf * 2 if type(leaf) is list else leaf

    return _mapped(batch, twice)


def _unlike(batch: Any, counter: TargetCounter, middle: int, count: int) -> Any:
    """The batch, with fewer targets in its first row if both halves have equally many for each row.

    Otherwise a mean over rows could not be told from one over targets.
    """
    first, second = (counter(_cut(batch, part, count)) for part in (slice(0, middle), slice(middle, count)))
    labels = counter.labels(batch)
    if (
        labels is None
        or labels.ndim != 2
        or first * (count - middle) != second * middle
        or "shift_labels" in batch
    ):
        return batch
    valid = (labels[0] != IGNORE_INDEX).nonzero().flatten().tolist()
    if len(valid) < 4:
        return batch
    labels = labels.clone()
    labels[0, valid[len(valid) // 2] :] = IGNORE_INDEX
    name = next(name for name in counter.label_names if batch.get(name) is not None)
    return {**batch, name: labels}
