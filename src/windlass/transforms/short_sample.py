"""A few rows and columns of a batch of text, for measurements that make whole logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from windlass.core.types import IGNORED

_ROWS, _COLUMNS = 2, 64


def short_sample(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rows of a batch that have the most targets, at their first ones; None if the batch cannot be cut or has no
    targets.

    The rows have different numbers of targets, so that a mean over targets is not one over rows.

    Args:
        batch: `labels`, int64, of shape (rows,) or (rows, length), and what belongs to them: tensors of shape
            (rows, ...). A tensor of another shape (images, tables of packed rows) cannot be cut.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim not in (1, 2):
        return None
    if any(isinstance(v, Tensor) and (v.ndim > 2 or v.shape[:1] != labels.shape[:1]) for v in batch.values()):
        return None
    real = (labels != IGNORED).reshape(len(labels), -1)
    rows = real.sum(dim=1).argsort(descending=True, stable=True)[:_ROWS]
    if not real[rows[0]].any():
        return None
    sample = {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
    if labels.ndim == 1:
        return sample
    # A causal model predicts the first target from the position before it.
    first = max(int(real[rows].any(dim=0).float().argmax()) - 1, 0)
    window = slice(first, first + _COLUMNS)
    sample = {
        name: value[:, window] if isinstance(value, Tensor) and value.shape[1:] == labels.shape[1:] else value
        for name, value in sample.items()
    }
    targets = (sample["labels"][0] != IGNORED).nonzero()[:, 0]
    if len(rows) > 1 and len(targets) > 3:
        sample["labels"] = sample["labels"].clone()
        sample["labels"][0, targets[len(targets) // 2 :]] = IGNORED
    return sample
