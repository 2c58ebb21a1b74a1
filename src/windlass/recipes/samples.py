"""Samples of a model: packed blocks of tokens, or encoded texts with a class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.errors import DataError
from windlass.core.types import IGNORED

# Texts encoded at once: enough for the threads of the tokenizer, few enough for the cache.
ENCODE_BATCH = 256


class Blocks:
    """Texts joined by end tokens and cut into blocks of fixed length; the padding of the last one has no labels.

    Items are `{"input_ids": int64 [block], "labels": int64 [block]}`. The model shifts the labels.
    """

    def __init__(self, tokens: Tensor, block: int, padding: int) -> None:
        self.tokens = len(tokens)
        missing = -len(tokens) % block
        self._ids = torch.cat([tokens, tokens.new_full((missing,), padding)]).view(-1, block)
        self._labels = self._ids
        if missing:
            self._labels = self._ids.clone()
            self._labels[-1, block - missing :] = IGNORED

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


class MaskedBlocks(Blocks):
    """Blocks for a masked language model: items `{"input_ids": int64 [block], "attention_mask": int64 [block]}`.

    The collator hides tokens and makes the labels; padding of the last block is neither seen nor hidden.
    """

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "attention_mask": (self._labels[index] != IGNORED).long()}


def pack(texts: Sequence[str], tokenizer: Any, block: int, kind: type[Blocks] = Blocks) -> Blocks:
    """Encode and pack `texts` as samples of this kind. Raises DataError if they have no token to predict."""
    end = tokenizer.eos_token_id
    encoded = _encode(texts, tokenizer, add_special_tokens=False)
    pieces = [np.asarray(ids if end is None else [*ids, end], dtype=np.int64) for ids in encoded]
    # In an array of numpy: a list of Python's integers would take several times as much.
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
    if len(tokens) < 2:
        raise DataError("the text has no tokens to train on")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (end or 0)
    return kind(torch.from_numpy(tokens), block, padding)


def encode_labelled(
    texts: Sequence[str], labels: list[int], tokenizer: Any, max_length: int
) -> list[dict[str, Any]]:
    """Encode texts, each truncated to `max_length` tokens, special tokens included. Items are `{"input_ids": list[int],
    "labels": int}`, to be padded by a collator.
    """
    return _labelled(_encode(texts, tokenizer, truncation=True, max_length=max_length), labels)


def _labelled(ids: Iterable[list[int]], labels: Iterable[int | list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": own, "labels": label} for own, label in zip(ids, labels, strict=True)]


def _encode(
    texts: Sequence[str], tokenizer: Any, target: bool = False, **options: Any
) -> Iterator[list[int]]:
    for start in range(0, len(texts), ENCODE_BATCH):
        part = list(texts[start : start + ENCODE_BATCH])
        # Some tokenizers, as Marian's, encode the texts to generate in another way.
        batch = {"text_target": part} if target else {"text": part}
        # verbose=False: no warning of texts longer than the model's context, which are cut into blocks
        yield from tokenizer(**batch, return_attention_mask=False, verbose=False, **options)["input_ids"]


class Pairs(list[dict[str, Any]]):
    """Encoded sources and targets, and the targets as they were written."""

    def __init__(self, samples: Iterable[dict[str, Any]], targets: Sequence[str]) -> None:
        super().__init__(samples)
        self.targets = targets


def encode_pairs(sources: Sequence[str], targets: Sequence[str], tokenizer: Any, max_length: int) -> Pairs:
    """The same of sources and targets, whose tokens are the labels."""
    options: dict[str, Any] = {"truncation": True, "max_length": max_length}
    labels = _encode(targets, tokenizer, target=True, **options)
    return Pairs(_labelled(_encode(sources, tokenizer, **options), labels), targets)
