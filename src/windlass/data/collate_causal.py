"""Batches of token ids and labels for a causal language model: padded rows, or one row without padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.types import IGNORED
from windlass.data.collate_flatten import document_places, positions
from windlass.data.collate_pad import Batch, Features, attended, framed, pad_rows


@dataclass
class DataCollatorForCausalLM:
    """Collate samples with `input_ids` and, if they have them, `labels` and `seq_lengths` (of packed rows).

    Without `padding_free`: `input_ids`, `labels` and `attention_mask` of shape (samples, longest), padded on the right.
    With `return_position_ids`, packed rows have no mask, for with one attention would not keep documents apart:
    `position_ids` start again with each document and each token of padding.

    With `padding_free`: one row of shape (1, tokens), and what models and attention kernels need to keep its documents
    apart: `position_ids` that restart with each document, `cu_seq_lens_q` and `cu_seq_lens_k` (its borders, int32, of
    shape (documents + 1,)), `max_length_q` and `max_length_k` (ints), `seq_idx` (the document of each token, int32, of
    shape (1, tokens)). The first label of a document is -100, because the token before it belongs to another one.
    There is no attention mask: kernels would ignore the borders.
    """

    pad_token_id: int  # fills `input_ids`
    padding_free: bool = False  # one row without padding
    return_position_ids: bool = False  # return `position_ids` for padded rows too
    # Round the length up to a multiple of this; in one row, what fills it is a document
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"  # "pt" or "np"

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(
                Problem("pad_to_multiple_of", self.pad_to_multiple_of, "use at least 1, or None")
            )

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        ids = [attended(sample, "input_ids") for sample in features]
        labels = [attended(s, "labels" if "labels" in s else "input_ids") for s in features]
        lengths = [_document_lengths(sample, len(row)) for sample, row in zip(features, ids, strict=True)]
        make = self._one_row if self.padding_free else self._padded
        chosen = return_tensors or self.return_tensors
        return {
            name: framed(value, chosen) if isinstance(value, np.ndarray) else value
            for name, value in make(ids, labels, lengths).items()
        }

    def _padded(self, ids: list[Any], labels: list[Any], lengths: list[list[int]]) -> Batch:
        pad = partial(pad_rows, side="right", multiple=self.pad_to_multiple_of)
        batch: Batch = {
            "input_ids": pad(ids, self.pad_token_id),
            "labels": pad(labels, IGNORED),
            "attention_mask": pad([np.ones_like(row) for row in ids], 0),
        }
        if self.return_position_ids:
            batch["position_ids"] = pad([positions(row) for row in lengths], 0)
            if any(len(row) > 1 for row in lengths):
                del batch["attention_mask"]
                batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _one_row(self, ids: list[Any], labels: list[Any], lengths: list[list[int]]) -> Batch:
        # An empty document would begin where the next one does, and the last one behind the end of the row.
        documents = [length for row in lengths for length in row if length]
        padding = -sum(documents) % (self.pad_to_multiple_of or 1)
        if padding:
            documents.append(padding)
        places = document_places(documents)
        targets = np.append(np.concatenate(labels), np.full(padding, IGNORED))
        targets[places["cu_seq_lens_q"][:-1]] = IGNORED
        filling = np.full(padding, self.pad_token_id)
        return {
            "input_ids": np.append(np.concatenate(ids), filling)[None],
            "labels": targets[None],
            **places,
        }


def _document_lengths(sample: Any, tokens: int) -> list[int]:
    if "seq_lengths" not in sample:
        return [tokens]
    lengths = [int(length) for length in sample["seq_lengths"]]
    if sum(lengths) != tokens:
        raise DataError(
            f"a packed row of {tokens} tokens has seq_lengths={lengths}, which add up to {sum(lengths)}: pack the data "
            "again, or remove the column."
        )
    return lengths
