"""Counts of targets and inputs of a batch, made on the host. The targets of an update are its loss's denominator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from windlass.core import host

IGNORE_INDEX = -100


def rows(batch: Any) -> int:
    """Number of samples in a collated batch: the first axis of its first tensor, 0 if it has none."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    values: Any = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, str):
        for value in values:
            count = rows(value)
            if count:
                return count
    return 0


@dataclass(frozen=True, slots=True)
class TargetCounter:
    """Counts the targets of a batch.

    Integer labels, one per row or per token, count unless they are -100. For real-valued labels, several label columns
    and batches without labels, rows are counted.

    Attributes:
        label_names: the batch's keys that hold labels.
        shifted: the model predicts label t from position t-1, so the first label of each row is not a target.
            Measured by `engine.probe`, never inferred from the name of a model.
    """

    label_names: tuple[str, ...] = ("labels",)
    shifted: bool = False

    def __call__(self, batch: Any) -> float:
        labels = self.labels(batch)
        if labels is None:
            # A batch without visible rows has the weight of one.
            return float(rows(batch) or 1)
        return float(_count(labels, first=int(self.shifted and "shift_labels" not in batch)))

    def labels(self, batch: Any) -> Tensor | None:
        """The integer labels that are counted, None if rows are."""
        if type(batch) is not dict and not isinstance(batch, Mapping):
            return None
        if "shift_labels" in batch:
            return _integer(batch["shift_labels"])
        present = [batch[name] for name in self.label_names if batch.get(name) is not None]
        return _integer(present[0]) if len(present) == 1 else None


def _integer(labels: Any) -> Tensor | None:
    if not isinstance(labels, Tensor) or not labels.ndim:
        return None
    kind = labels.dtype
    return None if kind.is_floating_point or kind.is_complex else labels


def _count(labels: Tensor, first: int) -> int:
    """The labels at position `first` of each row and after it that are not -100."""
    if not labels.is_cpu:  # `count_nonzero` of PyTorch/XLA counts a mask as 1
        return int((labels[..., first:] != IGNORE_INDEX).sum())
    if labels.ndim == 1 and labels.numel() <= 64:  # one label a row: too few for array arithmetic to pay
        values = host.read(labels)[first:]
        return len(values) - int(values.count(IGNORE_INDEX))
    # NumPy reads the same memory: no tensor operation, hence nothing that could wait for a device. Labels are compared
    # before they are cut, because it compares what is not contiguous at half the speed.
    return int(np.count_nonzero((labels.numpy() != IGNORE_INDEX)[..., first:]))


@dataclass(frozen=True, slots=True)
class InputCounter:
    """Counts the input positions of a batch.

    Attributes:
        main_input: the key of the batch whose positions are counted.
        pad_token_id: the padding of batches without an attention mask; None: they have no padding.
    """

    main_input: str = "input_ids"
    pad_token_id: int | None = None

    def positions(self, batch: Any) -> int:
        """All positions, padding included; 0 if the batch has no such input."""
        main = batch.get(self.main_input) if isinstance(batch, Mapping) else None
        return int(main.numel()) if isinstance(main, Tensor) else 0

    def real(self, batch: Any) -> int:
        """Positions other than padding, by the attention mask or else by the padding token."""
        if not isinstance(batch, Mapping):
            return 0
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor):
            return int(np.count_nonzero(mask.numpy()) if mask.is_cpu else (mask != 0).sum())
        main = batch.get(self.main_input)
        if not isinstance(main, Tensor) or self.pad_token_id is None:
            return self.positions(batch)
        return int((main != self.pad_token_id).sum())
