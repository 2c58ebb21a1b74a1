"""Batches of preferences in one row without padding, each prompt once, followed by both of its answers; and batches of
single answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from windlass.data.collate_pad import Batch, Features, framed, pad_rows
from windlass.data.collate_preference import (
    ANSWERS,
    DataCollatorForPreference,
    add_numbers,
    numbers_of,
    padded_batch,
)


@dataclass
class DataCollatorForSharedPrompts(DataCollatorForPreference):
    """As `DataCollatorForPreference`, for a batch of n pairs in one row.

    `input_ids`, `attention_mask` (all 1), `position_ids` and `completion_mask` (1 for tokens of an answer that are
    predicted) are of shape (1, tokens). `groups` has the tokens of the prefix and of the two branches of each pair (see
    `transforms/branches.py`): the prefix is the prompt without its last token, with which both branches begin, because
    the first token of each answer is predicted from it. `answer_places` and `answer_mask`, of shape (2 n, longest
    answer), have the places in the row that predict the tokens of each answer, the chosen ones first;
    `sequence_lengths`, of shape (2 n,), the tokens of each answer with its prompt.

    Args:
        shares_prompts: False: each answer comes after a copy of its prompt, as does one whose prompt is cut at its
            beginning.
    """

    shares_prompts: bool = True

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        made = return_tensors or self.return_tensors
        row = _JoinedPairs()
        for sample in features:
            self._add(row, sample)
        # Before the padding is added, which is a group but not an answer. The pairs' answers alternate in the
        # row.
        answers = [*row.places[0::2], *row.places[1::2]]
        lengths = [*row.lengths[0::2], *row.lengths[1::2]]
        padding = -len(row.ids) % (self.pad_to_multiple_of or 1)
        if padding:
            row.add([], [([self.pad_token_id] * padding, padding)])
        batch: Batch = {
            "input_ids": framed(np.array([row.ids], dtype=np.int64), made),
            "attention_mask": framed(np.ones((1, len(row.ids)), dtype=np.int64), made),
            "completion_mask": framed(np.array([row.mask], dtype=np.int64), made),
            "position_ids": framed(np.array([row.positions], dtype=np.int64), made),
            "answer_places": framed(pad_rows(answers, 0, "right"), made),
            "answer_mask": framed(pad_rows([[1] * len(places) for places in answers], 0, "right"), made),
            "sequence_lengths": framed(np.array(lengths, dtype=np.int64), made),
            "groups": row.groups,
        }
        add_numbers(batch, features, made)
        return batch

    def _add(self, row: _JoinedPairs, sample: Any) -> None:
        prompt = list(sample.get("prompt_ids", []))
        answers = [list(sample[name]) for name in ANSWERS]
        sequences = [self._cut([*prompt, *answer]) for answer in answers]
        lost = [
            len(prompt) + len(answer) - len(sequence)
            for answer, sequence in zip(answers, sequences, strict=True)
        ]
        # Tokens of each sequence that are its prompt: an end that is cut takes answer first, a beginning takes
        # prompt.
        if self.truncation_mode != "keep_end":
            context = [min(len(prompt), len(sequence)) for sequence in sequences]
        else:
            context = [max(len(prompt) - before, 0) for before in lost]
        is_whole = self.truncation_mode != "keep_end" or not any(lost)
        # Cut at their beginnings, two answers of different lengths have kept different parts of the prompt.
        if self.shares_prompts and is_whole:
            shared = max(min(context) - 1, 0)
            branches = [
                (sequence[shared:], at - shared) for sequence, at in zip(sequences, context, strict=True)
            ]
            row.add(sequences[0][:shared], branches)
        else:
            for sequence, at in zip(sequences, context, strict=True):
                row.add([], [(sequence, at)])


@dataclass
class _JoinedPairs:
    """Groups that are joined into one row; see `DataCollatorForSharedPrompts`."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    places: list[range] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, prefix: list[int], branches: Sequence[tuple[list[int], int]]) -> None:
        """Add a group. Of each branch are given its tokens, and how many of them belong to no answer."""
        self._append(prefix, 0, len(prefix))
        for tokens, context in branches:
            context = max(context, 1)  # nothing predicts the first token of a sequence
            end = len(self.ids) + len(tokens)
            # The place before a token predicts it.
            self.places.append(range(len(self.ids) + context - 1, end - 1))
            self._append(tokens, len(prefix), context)
            self.lengths.append(len(prefix) + len(tokens))
        self.groups.append([len(prefix), *(len(tokens) for tokens, _ in branches)])

    def _append(self, tokens: list[int], position: int, context: int) -> None:
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        self.mask += [int(at >= context) for at in range(len(tokens))]


MISMATCHED = "KL_"


@dataclass
class DataCollatorForUnpairedPreference:
    """Collate samples with `prompt_ids`, `completion_ids` and `label`.

    `input_ids`, `attention_mask` and `completion_mask` (1 for tokens of an answer) are of shape (samples, longest),
    padded on the right; `label` is bool, of shape (samples,). With `mismatches`, the same three with the prefix `KL_`:
    each prompt with the answer of the sample before it in the batch, the first one with that of the last.
    """

    pad_token_id: int  # fills `input_ids`
    max_length: int | None = None  # sequences are cut to this many tokens; None: they are not
    pad_to_multiple_of: int | None = None  # round the length up to a multiple of this
    mismatches: bool = True  # make those sequences
    return_tensors: str = "pt"  # "pt" or "np"

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        chosen = return_tensors or self.return_tensors
        prompts = [sample["prompt_ids"] for sample in features]
        answers = [sample["completion_ids"] for sample in features]
        batch = self._sequences(prompts, answers, chosen)
        if self.mismatches:
            others = self._sequences(prompts, [answers[-1], *answers[:-1]], chosen)
            batch.update({MISMATCHED + name: values for name, values in others.items()})
        labels = np.asarray([bool(sample["label"]) for sample in features])
        batch["label"] = torch.from_numpy(labels) if chosen == "pt" else labels
        if "ref_logps" in features[0]:
            batch["ref_logps"] = numbers_of(features, "ref_logps", chosen)
        return batch

    def _sequences(self, prompts: list[list[int]], answers: list[list[int]], return_tensors: str) -> Batch:
        most = self.max_length
        pairs = list(zip(prompts, answers, strict=True))
        ids = [[*prompt, *answer][:most] for prompt, answer in pairs]
        masks: list[Any] = [([0] * len(prompt) + [1] * len(answer))[:most] for prompt, answer in pairs]
        return padded_batch(ids, masks, self.pad_token_id, self.pad_to_multiple_of, return_tensors)
