"""Collators that pad with a tokenizer. The tokenizer is duck-typed: `pad`, `padding_side`, and what each
collator names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from windlass.data.collate_default import Features, unknown_framework

_FAST_WARNING = "Asking-to-pad-a-fast-tokenizer"


def pad_quietly(tokenizer: Any, features: Features, **options: Any) -> Any:
    """`tokenizer.pad` without its advice to call the tokenizer instead, which a collator cannot follow."""
    warnings = getattr(tokenizer, "deprecation_warnings", None)
    if warnings is None:  # a feature extractor
        return tokenizer.pad(features, **options)
    before = warnings.get(_FAST_WARNING, False)
    warnings[_FAST_WARNING] = True
    try:
        return tokenizer.pad(features, **options)
    finally:
        warnings[_FAST_WARNING] = before


def pad_rows(rows: list[Any], fill: int, side: str, width: int | None = None) -> np.ndarray[Any, Any]:
    """Rows of integers as one int64 array of shape (rows, width), padded on `side`, by default to the widest row."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    width = max(len(row) for row in arrays) if width is None else width
    padded = np.full((len(arrays), width), fill, dtype=np.int64)
    for target, row in zip(padded, arrays, strict=True):
        start = 0 if side == "right" else width - len(row)
        target[start : start + len(row)] = row
    return padded


def framed(array: np.ndarray[Any, Any], return_tensors: str) -> Any:
    """`array` itself for "np", as a tensor on the same memory for "pt"."""
    if return_tensors == "np":
        return array
    if return_tensors == "pt":
        return torch.from_numpy(array)
    raise unknown_framework(return_tensors)


class Framework:
    """`collator(features, return_tensors=None)` for collators that have `torch_call` (and `numpy_call`)."""

    return_tensors: str

    def __call__(self, features: Features, return_tensors: str | None = None) -> Any:
        chosen = return_tensors or self.return_tensors
        call = {"pt": "torch_call", "np": "numpy_call"}.get(chosen)
        if call is None or not hasattr(self, call):
            raise unknown_framework(chosen)
        return getattr(self, call)(features)


@dataclass
class DataCollatorWithPadding:
    """Pad the inputs of a batch to one length; `label` and `label_ids` become `labels`.

    Args:
        tokenizer: has `pad`.
        padding: True or "longest", "max_length", False or "do_not_pad".
        max_length: tokens; for "max_length".
        pad_to_multiple_of: round the length up to a multiple of this (tensor cores like 8).
        return_tensors: "pt" or "np".
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Features) -> Any:
        batch = pad_quietly(self.tokenizer, features, return_tensors=self.return_tensors, **_padding(self))
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch[name]
                del batch[name]
        return batch


@dataclass
class DataCollatorForTokenClassification(Framework):
    """Pad the inputs and, with `label_pad_token_id`, the labels: one per token, under `labels` (or `label`)."""

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = -100
    return_tensors: str = "pt"

    def torch_call(self, features: Features) -> Any:
        """The batch as tensors. `features` are mappings that the tokenizer can pad, with or without labels."""
        return self._batch(features, "pt")

    def numpy_call(self, features: Features) -> Any:
        """The batch as NumPy arrays; `features` as in `torch_call`."""
        return self._batch(features, "np")

    def _batch(self, features: Features, return_tensors: str) -> Any:
        labels, inputs, name = _without_labels(features)
        batch = pad_quietly(self.tokenizer, inputs, return_tensors=return_tensors, **_padding(self))
        if labels is not None:
            width = batch["input_ids"].shape[1]
            padded = pad_rows(labels, self.label_pad_token_id, self.tokenizer.padding_side, width)
            batch[name] = framed(padded, return_tensors)
        return batch


@dataclass
class DataCollatorForMultipleChoice(Framework):
    """Pad all choices of all examples to one length: each input becomes (batch, choices, tokens), `labels` (batch,)."""

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Features) -> dict[str, Any]:
        """The batch as tensors. Each of `examples` maps an input to a list with one value per choice; all have as many
        choices as the first one.
        """
        labels, inputs, _ = _without_labels(examples)
        choices = len(inputs[0]["input_ids"])
        flat = [
            {name: value[i] for name, value in example.items()} for example in inputs for i in range(choices)
        ]
        padded = pad_quietly(self.tokenizer, flat, return_tensors="pt", **_padding(self))
        batch = {name: value.view(len(examples), choices, -1) for name, value in padded.items()}
        if labels is not None:
            batch["labels"] = torch.tensor(labels, dtype=torch.int64)
        return batch


@dataclass
class DataCollatorForSeq2Seq:
    """Pad inputs and labels, which may have different lengths, and make `decoder_input_ids` if `model` can.

    Args:
        tokenizer: has `pad` and `padding_side`.
        model: its `prepare_decoder_input_ids_from_labels` is used if it has one.
        label_pad_token_id: what labels are padded with; losses ignore -100.
        padding: as in `DataCollatorWithPadding`; for labels too.
        max_length: as in `DataCollatorWithPadding`; for labels too.
        pad_to_multiple_of: as in `DataCollatorWithPadding`; for labels too.
        return_tensors: "pt" or "np".
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = -100
    return_tensors: str = "pt"

    def __call__(self, features: Features, return_tensors: str | None = None) -> Any:
        chosen = return_tensors or self.return_tensors
        labels, inputs, _ = _without_labels(features)
        if labels is not None and all(label is None for label in labels):
            labels = None
        batch = pad_quietly(self.tokenizer, inputs, return_tensors=chosen, **_padding(self))
        batch["labels"] = None if labels is None else framed(self._padded(labels), chosen)
        if labels is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(
                labels=batch["labels"]
            )
        return batch

    def _padded(self, labels: list[Any]) -> np.ndarray[Any, Any]:
        if self.padding is False or self.padding == "do_not_pad":
            return np.array([np.asarray(label, dtype=np.int64) for label in labels], dtype=np.int64)
        fixed = self.padding == "max_length" and self.max_length is not None
        width = self.max_length if fixed else max(len(label) for label in labels)
        assert width is not None
        multiple = self.pad_to_multiple_of or 1
        return pad_rows(
            labels, self.label_pad_token_id, self.tokenizer.padding_side, -(-width // multiple) * multiple
        )


def _padding(collator: Any) -> dict[str, Any]:
    return {
        "padding": collator.padding,
        "max_length": collator.max_length,
        "pad_to_multiple_of": collator.pad_to_multiple_of,
    }


def _without_labels(features: Features) -> tuple[list[Any] | None, Features, str]:
    """Labels (None if there are none), the features without them, and the name of their column."""
    name = "label" if "label" in features[0] else "labels"
    labels = [feature[name] for feature in features] if name in features[0] else None
    return labels, [{key: value for key, value in f.items() if key != name} for f in features], name
