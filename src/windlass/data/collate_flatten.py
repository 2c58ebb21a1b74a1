"""A batch as one long sequence, without padding."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from windlass.data.collate_pad import Batch, DefaultDataCollator, Features, attended, framed


class DataCollatorWithFlattening(DefaultDataCollator):
    """Concatenate all samples into one sequence of shape (1, total tokens); the model separates them by position.
    Tokens that the `attention_mask` of a sample leaves out are left out.

    Args:
        return_tensors: "pt" or "np".
        return_position_ids: return `position_ids`, which restart with each sample.
        separator_id: label of each sample's first token, so that no sample predicts the next.
        return_flash_attn_kwargs: return `cu_seq_lens_q/k` (int32 boundaries) and `max_length_q/k` (ints).
        return_seq_idx: return `seq_idx`, int32: the sample that each token belongs to.
        position_ids_start: first position of each sample; RoBERTa-like models count from `padding_idx + 1`.
    """

    def __init__(
        self,
        return_tensors: str = "pt",
        *,
        return_position_ids: bool = True,
        separator_id: int = -100,
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
    ) -> None:
        super().__init__(return_tensors)
        self.return_position_ids = return_position_ids
        self.separator_id = separator_id
        self.return_flash_attn_kwargs = return_flash_attn_kwargs
        self.return_seq_idx = return_seq_idx
        self.position_ids_start = position_ids_start

    def __call__(
        self, features: Features, return_tensors: str | None = None, separator_id: int | None = None
    ) -> Batch:
        separator = self.separator_id if separator_id is None else separator_id
        ids = [attended(sample, "input_ids") for sample in features]
        targets = [attended(s, "labels" if "labels" in s else "input_ids") for s in features]
        for target in targets:
            target[:1] = separator
        columns: Batch = {"input_ids": np.concatenate(ids)[None], "labels": np.concatenate(targets)[None]}
        lengths = [len(sample) for sample in ids]
        columns.update(self._places(lengths))
        chosen = return_tensors or self.return_tensors
        return {k: framed(v, chosen) if isinstance(v, np.ndarray) else v for k, v in columns.items()}

    def _places(self, lengths: list[int]) -> Batch:
        """The columns that separate the samples."""
        asked = {"position_ids": self.return_position_ids, "seq_idx": self.return_seq_idx}
        found = document_places(lengths)
        found["position_ids"] += self.position_ids_start
        return {
            name: value for name, value in found.items() if asked.get(name, self.return_flash_attn_kwargs)
        }


def document_places(lengths: list[int]) -> Batch:
    """What tells models and attention kernels which token of one row belongs to which document, as NumPy arrays:
    `position_ids` and `seq_idx` of shape (1, tokens), the borders `cu_seq_lens_q` and `cu_seq_lens_k`, and the numbers
    `max_length_q` and `max_length_k`.
    """
    borders = np.array([0, *accumulate(lengths)], dtype=np.int32)
    return {
        "position_ids": positions(lengths)[None],
        "seq_idx": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders.copy(),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def positions(lengths: list[int]) -> np.ndarray[Any, Any]:
    """Positions that begin again with each document."""
    return np.concatenate([np.arange(length) for length in lengths])
