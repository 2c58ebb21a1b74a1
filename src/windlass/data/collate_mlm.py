"""Collators that mask or permute tokens for language models, and their random draws."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from windlass.core.logs import get_logger
from windlass.core.types import IGNORED
from windlass.data.collate_pad import Features, Framework, framed, pad_quietly, pad_rows

logger = get_logger(__name__)
Array = np.ndarray[Any, Any]


class TorchDraws:
    """Draws from `generator`, or PyTorch's default generator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def coins(self, chance: Array | float, shape: tuple[int, ...]) -> Array:
        chances = torch.full(shape, chance) if isinstance(chance, float) else torch.from_numpy(chance).float()
        return torch.bernoulli(chances, generator=self._generator).bool().numpy()

    def words(self, vocabulary: int, where: Array) -> Array:
        # One for each place, used or not, as transformers draws them: the same seed masks the same tokens.
        return torch.randint(vocabulary, where.shape, generator=self._generator).numpy()[where]

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self._generator).item())

    def permutation(self, count: int) -> Array:
        return torch.randperm(count, generator=self._generator).numpy()


class NumpyDraws:
    """Draws from `generator`, or NumPy's global state."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self._generator: Any = generator or np.random

    def coins(self, chance: Array | float, shape: tuple[int, ...]) -> Array:
        return self._generator.binomial(1, chance, size=shape).astype(bool)  # type: ignore[no-any-return]

    def words(self, vocabulary: int, where: Array) -> Array:
        draw = getattr(self._generator, "integers", None) or self._generator.randint
        # For the chosen places alone, as transformers draws them with NumPy.
        return draw(low=0, high=vocabulary, size=int(where.sum()), dtype=np.int64)  # type: ignore[no-any-return]

    def integer(self, low: int, high: int) -> int:
        draw = getattr(self._generator, "integers", None) or self._generator.randint
        return int(draw(low, high))

    def permutation(self, count: int) -> Array:
        return self._generator.permutation(count)  # type: ignore[no-any-return]


Draws = TorchDraws | NumpyDraws
"""Random draws as NumPy arrays, from either library's generators."""


@dataclass
class DataCollatorForLanguageModeling(Framework):
    """Pad, and make labels for causal (`mlm=False`) or masked language modelling (BERT, Devlin et al. 2019).

    Causal: labels are the inputs, with padding set to -100. Masked: a share of the tokens is chosen; of
    these, `mask_replace_prob` become the mask token, `random_replace_prob` a random token, the rest stay;
    labels are -100 everywhere else.

    Args:
        tokenizer: `pad`, `pad_token_id`; for mlm also `mask_token`, `mask_token_id`,
            `get_special_tokens_mask`, `__len__`.
        mlm: masked rather than causal.
        whole_word_mask: choose whole words; needs `offset_mapping` in the samples; replaces by the mask token only.
        mlm_probability: share of tokens (or words) chosen.
        mask_replace_prob: share of the chosen tokens that the mask token replaces.
        random_replace_prob: share of the chosen tokens that random tokens replace.
        pad_to_multiple_of: round the length up to a multiple of this.
        return_tensors: "pt" or "np".
        seed: draw from an own generator; under a Windlass loader it is seeded by (this seed, epoch, first
            sample) for each batch.

    Raises:
        ValueError: shares outside 0..1, or no mask token for mlm.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None
    generator: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        if self.whole_word_mask and self.mask_replace_prob < 1:
            logger.warning(
                "whole word masking replaces by the mask token only: mask_replace_prob is set to 1"
            )
            self.mask_replace_prob, self.random_replace_prob = 1, 0
        if self.mlm:
            self.mlm_probability = float(self.mlm_probability or 0)
        # `TorchDraws.coins` takes anything else than a float for an array.
        self.mask_replace_prob = float(self.mask_replace_prob)
        self.random_replace_prob = float(self.random_replace_prob)

    def _check(self) -> None:
        if self.mlm and self.tokenizer.mask_token is None:
            raise ValueError(
                "the tokenizer has no mask token, which mlm=True needs; use mlm=False for causal models"
            )
        if self.whole_word_mask and not self.mlm:
            raise ValueError("whole_word_mask=True needs mlm=True")
        shares: dict[str, float | None] = {
            "mask_replace_prob": self.mask_replace_prob,
            "random_replace_prob": self.random_replace_prob,
        }
        if self.mlm:
            shares["mlm_probability"] = self.mlm_probability
        for name, value in shares.items():
            if value is None or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r}: must lie between 0 and 1")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError("mask_replace_prob + random_replace_prob must not exceed 1")

    def get_generator(self, seed: int) -> torch.Generator | np.random.Generator:
        """A new generator, seeded with `seed`, of the library that `return_tensors` names."""
        is_torch = self.return_tensors == "pt"
        return torch.Generator().manual_seed(seed) if is_torch else np.random.default_rng(seed)

    def create_rng(self) -> None:
        """Begin drawing from `seed` (plus the worker's number in a worker of PyTorch's `DataLoader`)."""
        assert self.seed is not None
        worker = get_worker_info()
        if worker is None and multiprocessing.current_process().name != "MainProcess":
            raise ValueError("seed= needs the main process or a worker of torch.utils.data.DataLoader")
        self.generator = self.get_generator(self.seed + (worker.id if worker else 0))

    def torch_call(self, examples: Features) -> Any:
        """The batch as tensors. `examples` are mappings that the tokenizer can pad, or lists of token ids."""
        return self._batch(examples, "pt")

    def numpy_call(self, examples: Features) -> Any:
        """The batch as NumPy arrays; `examples` as in `torch_call`."""
        return self._batch(examples, "np")

    def _batch(self, examples: Features, return_tensors: str) -> Any:
        if self.seed is not None and self.generator is None:
            self.create_rng()
        batch = self._padded(examples, return_tensors)
        special, offsets = batch.pop("special_tokens_mask", None), batch.pop("offset_mapping", None)
        if self.mlm:
            mask = self.torch_mask_tokens if return_tensors == "pt" else self.numpy_mask_tokens
            batch["input_ids"], batch["labels"] = mask(batch["input_ids"], special, offsets)
            return batch
        labels = batch["input_ids"].clone() if return_tensors == "pt" else batch["input_ids"].copy()
        if self.tokenizer.pad_token_id is not None:
            # As transformers does: where the end-of-sequence token is the padding token too, no end is learnt.
            labels[labels == self.tokenizer.pad_token_id] = IGNORED
        batch["labels"] = labels
        return batch

    def _padded(self, examples: Features, return_tensors: str) -> Any:
        if isinstance(examples[0], Mapping):
            options = {"return_tensors": return_tensors, "pad_to_multiple_of": self.pad_to_multiple_of}
            return pad_quietly(self.tokenizer, examples, **options)
        return {
            "input_ids": framed(pad_ids(examples, self.tokenizer, self.pad_to_multiple_of), return_tensors)
        }

    def torch_mask_tokens(
        self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[Any, Any]:
        """Mask tokens of `inputs` (batch, tokens) in place. Returns (inputs, labels), int64 of the same shape.

        Args:
            inputs: token ids on the host.
            special_tokens_mask: (batch, tokens), 1 for tokens that are never masked; None: the tokenizer finds them.
            offset_mapping: (batch, tokens, 2), the characters at which each token starts and ends, for
                `whole_word_mask`.
        """
        array = inputs.numpy()
        _, labels = self._mask(array, special_tokens_mask, offset_mapping, TorchDraws(self.generator))
        return torch.from_numpy(array), torch.from_numpy(labels)

    def numpy_mask_tokens(
        self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[Any, Any]:
        """`torch_mask_tokens` for NumPy arrays: `inputs`, `special_tokens_mask` and `offset_mapping` as there."""
        return self._mask(inputs, special_tokens_mask, offset_mapping, NumpyDraws(self.generator))

    def _mask(self, inputs: Array, special: Any, offsets: Any, draws: Draws) -> tuple[Array, Array]:
        labels = inputs.copy()
        special = special_tokens(self.tokenizer, labels) if special is None else np.asarray(special)
        words = self._words(special, offsets) if self.whole_word_mask else None
        # One draw for each word, at its first token.
        never = special.astype(bool) if words is None else ~words[1]
        assert self.mlm_probability is not None
        chosen = draws.coins(np.where(never, 0.0, self.mlm_probability), labels.shape)
        if words is not None:
            chosen = _spread_over_words(chosen, words[0])
        labels[~chosen] = IGNORED
        hidden = draws.coins(self.mask_replace_prob, labels.shape) & chosen
        inputs[hidden] = self.tokenizer.mask_token_id
        if self.mask_replace_prob == 1 or self.random_replace_prob == 0:
            return inputs, labels
        # Of the chosen tokens that the first draw has left over.
        share = self.random_replace_prob / (1 - self.mask_replace_prob)
        swapped = draws.coins(share, labels.shape) & chosen & ~hidden
        inputs[swapped] = draws.words(len(self.tokenizer), swapped)
        return inputs, labels

    def _words(self, special: Array, offsets: Any) -> tuple[Array, Array]:
        if offsets is None:
            raise ValueError(
                "whole_word_mask=True needs 'offset_mapping': tokenize with return_offsets_mapping=True"
            )
        return word_numbers(np.asarray(offsets), special.astype(bool))


def word_numbers(offsets: Array, special: Array) -> tuple[Array, Array]:
    """Which word each token belongs to.

    A word begins at a token that does not start where the one before it ended, or that follows a special token.

    Args:
        offsets: (batch, tokens, 2), characters at which each token starts and ends.
        special: bool of shape (batch, tokens).

    Returns:
        word numbers (-1 for special tokens) and whether a token is the first of its word, both (batch, tokens).
    """
    ends_before = np.roll(offsets[:, :, 1], 1, axis=1)
    # `roll` has put the row's last token here.
    ends_before[:, 0] = -1
    special_before = np.roll(special, 1, axis=1)
    special_before[:, 0] = False
    first = ~special & ((offsets[:, :, 0] != ends_before) | special_before)
    return np.where(special, -1, np.cumsum(first, axis=1)), first


def _spread_over_words(chosen: Array, words: Array) -> Array:
    """Choose every token of a word of which one token is chosen."""
    result = np.zeros_like(chosen)
    for row, numbers, picked in zip(result, words, chosen, strict=True):
        row[:] = np.isin(numbers, numbers[picked]) & (numbers != -1)
    return result


def special_tokens(tokenizer: Any, ids: Array) -> Array:
    """Which tokens are special, bool of the shape of `ids` (batch, tokens)."""
    rows = [tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in ids.tolist()]
    return np.array(rows, dtype=bool)


def pad_ids(examples: Features, tokenizer: Any, pad_to_multiple_of: int | None = None) -> Array:
    """Lists of token ids as one int64 array of shape (batch, tokens), padded with the padding token. Raises ValueError
    if padding is needed and the tokenizer has no padding token.
    """
    fill, side = tokenizer.pad_token_id or 0, tokenizer.padding_side
    padded = pad_rows(examples, fill, side, multiple=pad_to_multiple_of)
    # Filled with 0 in any case, and refused only if something was filled.
    if min(map(len, examples)) < padded.shape[1] and tokenizer.pad_token is None:
        raise ValueError(
            f"samples of different lengths must be padded, and {type(tokenizer).__name__} has no pad token; "
            "set one: tokenizer.pad_token = tokenizer.eos_token"
        )
    return padded


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
        ValueError: an odd length (half of the sequence is memory of the other half), no mask token, or spans that do
            not fit into their contexts.
    """

    tokenizer: Any
    plm_probability: float = 1 / 6
    max_span_length: int = 5
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        if not 0 < self.plm_probability <= 1:
            raise ValueError(f"plm_probability={self.plm_probability!r}: must lie above 0, and not above 1")
        if self.max_span_length < 1:
            raise ValueError(f"max_span_length={self.max_span_length!r}: must be at least 1")

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
                f"the sequences have {length} tokens, and an even number is needed: tokenize them with padding=True "
                "and pad_to_multiple_of=2"
            )
        labels = inputs.copy()
        fixed = special_tokens(self.tokenizer, labels)
        if self.tokenizer.pad_token is not None:
            fixed |= labels == self.tokenizer.pad_token_id
        hidden = np.stack([self._spans(length, draws) for _ in range(rows)]) & ~fixed
        inputs[hidden] = self.tokenizer.mask_token_id
        labels[~hidden] = IGNORED
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
