"""Batches of preferences: the chosen answers of all pairs with their prompts, and then the rejected ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from windlass.core.errors import ConfigError, Problem
from windlass.data.collate_pad import Batch, Features, framed, pad_rows

ANSWERS = ("chosen_ids", "rejected_ids")
# Columns of numbers, one for each pair.
NUMBERS = ("ref_chosen_logps", "ref_rejected_logps", "margin")


@dataclass
class DataCollatorForPreference:
    """Collate samples with `chosen_ids`, `rejected_ids` and, if they have one, `prompt_ids`, which comes before both.

    A batch of n pairs has 2 n rows, padded on the right: row i is the chosen answer of pair i, row n + i the rejected
    one. `input_ids`, `attention_mask` and `completion_mask` (1 for tokens of an answer) are of shape (2 n, longest). Of
    the columns `ref_chosen_logps`, `ref_rejected_logps` and `margin` those that samples have are of shape (n,).
    """

    pad_token_id: int  # fills `input_ids`
    max_length: int | None = None  # sequences are cut to this many tokens; None: they are not
    truncation_mode: str = "keep_start"  # which end of a sequence is kept, "keep_start" or "keep_end"
    pad_to_multiple_of: int | None = None  # round the length up to a multiple of this
    return_tensors: str = "pt"  # "pt" or "np"

    def __post_init__(self) -> None:
        if self.truncation_mode not in ("keep_start", "keep_end", "error"):
            fix = "use 'keep_start' or 'keep_end'"
            raise ConfigError(Problem("truncation_mode", self.truncation_mode, fix))
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(
                Problem("pad_to_multiple_of", self.pad_to_multiple_of, "use at least 1, or None")
            )

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        chosen = return_tensors or self.return_tensors
        ids, masks = [], []
        for name in ANSWERS:
            for sample in features:
                prompt, answer = sample.get("prompt_ids", []), sample[name]
                ids.append(self._cut([*prompt, *answer]))
                masks.append(self._cut([0] * len(prompt) + [1] * len(answer)))
        batch = padded_batch(ids, masks, self.pad_token_id, self.pad_to_multiple_of, chosen)
        add_numbers(batch, features, chosen)
        return batch

    def _cut(self, row: list[int]) -> list[int]:
        if self.max_length is None:
            return row
        return row[-self.max_length :] if self.truncation_mode == "keep_end" else row[: self.max_length]


def padded_batch(
    ids: list[list[int]], masks: list[list[int]], fill: int, multiple: int | None, return_tensors: str
) -> Batch:
    """`input_ids`, `attention_mask` and `completion_mask` of sequences, padded on the right.

    Args:
        masks: of each sequence, 1 for tokens of an answer.
        fill: the token of padding.
        multiple: the length is rounded up to a multiple of it.
    """
    pad = partial(pad_rows, side="right", multiple=multiple)
    return {
        "input_ids": framed(pad(ids, fill), return_tensors),
        "attention_mask": framed(pad([[1] * len(row) for row in ids], 0), return_tensors),
        "completion_mask": framed(pad(masks, 0), return_tensors),
    }


def add_numbers(batch: Batch, features: Features, return_tensors: str) -> None:
    """Add the columns of numbers that samples have."""
    for name in NUMBERS:
        if name in features[0]:
            batch[name] = numbers_of(features, name, return_tensors)


def numbers_of(features: Features, name: str, return_tensors: str) -> Any:
    """A column of numbers in single precision; float64 values that single precision cannot hold keep their type."""
    values = np.asarray([sample[name] for sample in features], dtype=np.float64)
    single = values.astype(np.float32)
    kept = single if np.array_equal(single.astype(np.float64), values, equal_nan=True) else values
    return torch.from_numpy(kept) if return_tensors == "pt" else kept
