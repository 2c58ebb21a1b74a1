"""Batches of single answers that are judged desirable or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from windlass.data.collate_pad import Batch, Features
from windlass.data.collate_preference import numbers_of, padded_batch

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
