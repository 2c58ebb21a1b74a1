"""Permutation language modelling (XLNet, Yang et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from windlass.data.collate_mlm import Array, Draws, NumpyDraws, TorchDraws, pad_ids, special_tokens
from windlass.data.collate_pad import Features, Framework

_NAMES = ("input_ids", "perm_mask", "target_mapping", "labels")


@dataclass
class DataCollatorForPermutationLanguageModeling(Framework):
    """Mask spans of tokens; `perm_mask` holds which tokens each may see in a random order of factorisation.

    A span of 1..`max_span_length` tokens lies at a random place of a context of `span / plm_probability`
    tokens; contexts follow each other to the end of the sequence. Special tokens and padding are never
    hidden.

    Returns:
        `input_ids`, `labels` (batch, tokens) int64, and `perm_mask`, `target_mapping` (batch, tokens, tokens)
            float32, where perm_mask[b, i, j] = 1 if token i may not see token j.

    Raises:
        ValueError: an odd length (half of the sequence is memory of the other half), or no mask token.
    """

    tokenizer: Any
    plm_probability: float = 1 / 6
    max_span_length: int = 5
    return_tensors: str = "pt"

    def torch_call(self, examples: Features) -> dict[str, Any]:
        """The batch as tensors. `examples` are mappings with `input_ids`, or lists of token ids."""
        parts = self.torch_mask_tokens(torch.from_numpy(self._padded(examples)))
        return dict(zip(_NAMES, parts, strict=True))

    def numpy_call(self, examples: Features) -> dict[str, Any]:
        """The batch as NumPy arrays; `examples` as in `torch_call`."""
        return dict(zip(_NAMES, self.numpy_mask_tokens(self._padded(examples)), strict=True))

    def torch_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (inputs, perm_mask, target_mapping, labels); `inputs` (batch, tokens) is changed in place."""
        ids, perm_mask, target_mapping, labels = self._mask(inputs.numpy(), TorchDraws())
        return tuple(torch.from_numpy(part) for part in (ids, perm_mask, target_mapping, labels))  # type: ignore[return-value]

    def numpy_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """`torch_mask_tokens` for a NumPy array, `inputs`, which is changed in place."""
        return self._mask(inputs, NumpyDraws())

    def _padded(self, examples: Features) -> Array:
        if isinstance(examples[0], Mapping):
            examples = [example["input_ids"] for example in examples]
        return pad_ids(examples, self.tokenizer)

    def _mask(self, inputs: Array, draws: Draws) -> tuple[Array, Array, Array, Array]:
        if self.tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token, which permutation language modelling needs")
        rows, length = inputs.shape
        if length % 2:
            raise ValueError(
                f"the sequences have {length} tokens; an even number is needed (pad_to_multiple_of=2)"
            )
        labels = inputs.copy()
        fixed = special_tokens(self.tokenizer, labels)
        if self.tokenizer.pad_token is not None:
            fixed |= labels == self.tokenizer.pad_token_id
        hidden = np.stack([self._spans(length, draws) for _ in range(rows)]) & ~fixed
        inputs[hidden] = self.tokenizer.mask_token_id
        labels[~hidden] = -100
        perm_mask = np.stack([_unseen(hidden[i], fixed[i], draws) for i in range(rows)])
        target_mapping = np.broadcast_to(np.eye(length, dtype=np.float32), (rows, length, length)).copy()
        return inputs.astype(np.int64), perm_mask, target_mapping, labels.astype(np.int64)

    def _spans(self, length: int, draws: Draws) -> Array:
        hidden, start = np.zeros(length, dtype=bool), 0
        while start < length:
            span = draws.integer(1, self.max_span_length + 1)
            context = int(span / self.plm_probability)
            first = start + draws.integer(0, context - span + 1)
            hidden[first : first + span] = True
            start += context
        return hidden


def _unseen(hidden: Array, fixed: Array, draws: Draws) -> Array:
    """(tokens, tokens) float32 of one sequence: 1 if the row's token may not see the column's."""
    half = len(hidden) // 2
    # Both halves take the same permutation and do not mix: the first is what the model remembers while it
    # reads the second.
    rank = np.arange(len(hidden)).reshape(-1, half).T[draws.permutation(half)].T.reshape(-1)
    rank[~hidden & ~fixed] = -1  # plain tokens come first: all may see them, and they see nothing hidden
    return ((rank[:, None] <= rank[None, :]) & hidden).astype(np.float32)
