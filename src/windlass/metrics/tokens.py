"""Counts of targets and inputs of a batch, made on the host. The targets of an update are its loss's denominator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.trees import tensors_in
from windlass.core.types import IGNORED


def rows(batch: Any) -> int:
    """Number of samples in a collated batch: the first axis of its first tensor that has rows; 1 if its tensors are
    single numbers, and 0 if it has none.
    """
    tensors = list(tensors_in(batch))
    count = next((len(tensor) for tensor in tensors if tensor.ndim and len(tensor)), 0)
    return count or int(any(not tensor.ndim for tensor in tensors))


def comes_shifted(batch: Mapping[str, Any]) -> bool:
    """Return True if a batch has `shift_labels`, which its model takes in place of labels that it shifts itself. The
    key alone, with None, says nothing.
    """
    return batch.get("shift_labels") is not None


@dataclass(frozen=True, slots=True)
class TargetCounter:
    """Counts the targets of a batch.

    Integer labels, one per row, token or pixel, count unless they are ignored. For real-valued labels, several label
    columns and batches without labels, rows are counted.
    """

    label_names: tuple[str, ...] = ("labels",)  # the batch's keys that hold labels
    # The model predicts label t from position t-1, so the first label of each row is not a target. Measured by
    # `engine.probe`, never inferred from the name of a model.
    shifted: bool = False
    # The label that is left out of maps, which have one per pixel; the label of a row may have this number, too.
    ignored_pixel: int = IGNORED

    def __call__(self, batch: Any) -> float:
        labels = self.labels(batch)
        if labels is None:
            # A batch without visible rows has the weight of one.
            return float(rows(batch) or 1)
        first = int(self.shifted and batch.get("shift_labels") is None)
        ignored = self.ignored_pixel if labels.ndim > 2 else IGNORED
        if not labels.is_cpu:  # `count_nonzero` of PyTorch/XLA counts a mask as 1
            return float((labels[..., first:] != ignored).sum())
        if labels.ndim == 1 and labels.numel() <= 64:  # one label a row: too few for array arithmetic to pay
            values = labels.numpy()[first:].tolist()
            return float(len(values) - values.count(ignored))
        # NumPy reads the same memory: no tensor operation, hence nothing that could wait for a device. Labels are
        # compared before they are cut, because it compares what is not contiguous at half the speed.
        return float(np.count_nonzero((labels.numpy() != ignored)[..., first:]))

    def labels(self, batch: Any) -> Tensor | None:
        """The integer labels that are counted, None if rows are."""
        if type(batch) is not dict and not isinstance(batch, Mapping):
            return None
        # As `comes_shifted`, which costs a call for each batch.
        names = self.label_names if batch.get("shift_labels") is None else ("shift_labels",)
        present = [batch[name] for name in names if batch.get(name) is not None]
        # Of several columns it is not known which of them the loss divides by.
        if len(present) != 1 or not isinstance(present[0], Tensor) or not present[0].ndim:
            return None
        kind = present[0].dtype
        return None if kind.is_floating_point or kind.is_complex else present[0]


@dataclass(frozen=True, slots=True)
class InputCounter:
    """Counts the inputs of a batch: its tokens, and its positions with padding.

    Attributes:
        main_input: the key of the batch whose positions are counted; a batch without it has none.
        tokens: which positions are tokens: "all", "no", or "non_padding" ones.
        pad_token_id: the padding of batches without an attention mask; None: they have no padding.
    """

    main_input: str = "input_ids"
    tokens: str = "all"
    pad_token_id: int | None = None

    def __call__(self, batch: Any) -> tuple[int, int]:
        main = batch.get(self.main_input) if isinstance(batch, Mapping) else None
        positions = int(main.numel()) if isinstance(main, Tensor) else 0
        if self.tokens == "non_padding":
            return self._real(batch, main, positions), positions
        return (positions if self.tokens == "all" else 0), positions

    def _real(self, batch: Any, main: Any, positions: int) -> int:
        """Positions other than padding, by the attention mask or else by the padding token."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() <= 2:  # a larger one says who attends to whom
            return int(torch.count_nonzero(mask))
        if not isinstance(main, Tensor) or self.pad_token_id is None:
            return positions
        return int((main != self.pad_token_id).sum())
