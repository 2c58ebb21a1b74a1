"""Collators that stack, and those that pad with a tokenizer, which is duck-typed: `pad`, `padding_side`, and what each
collator names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from windlass.core.errors import DataError

Features = list[Any]
Batch = dict[str, Any]


def unknown_framework(return_tensors: object) -> ValueError:
    return ValueError(
        f"return_tensors={return_tensors!r}: use 'pt' for PyTorch tensors or 'np' for NumPy arrays"
    )


def auto_collate(samples: list[Any]) -> Any:
    """Dict samples, and objects with attributes, as `default_data_collator` makes them; tuples, tensors and numbers as
    PyTorch's `default_collate` does.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return _collated(samples, _stack_torch, _torch_labels)
    # Classes derived from those of values have attributes too.
    if hasattr(first, "__dict__") and not isinstance(first, torch.Tensor | np.ndarray | Sequence | Number):
        return default_data_collator(samples)
    return plain_collate(samples)


def default_data_collator(features: Features, return_tensors: str = "pt") -> Batch:
    """Stack the values of each key; `label` (a number) and `label_ids` (a list) become `labels`.

    The keys are those of the first sample; its None and string values are left out. Samples may be
    mappings, or objects whose attributes are the values.

    Args:
        features: the samples, all of one shape.
        return_tensors: "pt" (labels int64 or float32) or "np" (int64 or float32).

    Returns:
        key -> tensor or array of shape (batch, *shape of the value).
    """
    samples = features if isinstance(features[0], Mapping) else [vars(feature) for feature in features]
    if return_tensors == "pt":
        return _collated(samples, _stack_torch, _torch_labels)
    if return_tensors == "np":
        return _collated(samples, _stack_numpy, _numpy_labels)
    raise unknown_framework(return_tensors)


@dataclass
class DefaultDataCollator:
    """`default_data_collator` as an object that remembers `return_tensors`."""

    return_tensors: str = "pt"

    def __call__(self, features: Features, return_tensors: str | None = None) -> Batch:
        return default_data_collator(features, return_tensors or self.return_tensors)


def _collated(
    samples: Features, stack: Callable[[list[Any]], Any], labels: Callable[[list[Any], bool], Any]
) -> Batch:
    first, batch = samples[0], {}
    name: Any = None
    try:
        if first.get("label") is not None:
            batch["labels"] = labels([sample["label"] for sample in samples], False)
        elif first.get("label_ids") is not None:
            batch["labels"] = labels([sample["label_ids"] for sample in samples], True)
        for name, value in first.items():
            if name not in ("label", "label_ids") and value is not None and not isinstance(value, str):
                batch[name] = stack([sample[name] for sample in samples])
    except KeyError as error:
        raise _lacking(samples) or error from error
    except (RuntimeError, ValueError, TypeError) as error:
        if name is None:
            raise  # of the labels
        raise _cannot_stack(name, [sample[name] for sample in samples], error) from error
    return batch


def _lacking(samples: Features) -> DataError | None:
    """The error of the first sample that lacks a column of the batch's first; None if none does."""
    for number, sample in enumerate(samples):
        missing = [name for name in samples[0] if name not in sample]
        if missing:
            return DataError(
                f"sample {number} of a batch has no column {missing[0]!r}, which its first sample has: give every row "
                "the same columns"
            )
    return None


def _cannot_stack(name: str, values: list[Any], error: Exception) -> DataError:
    shapes = sorted({shape for value in values if (shape := _shape(value))})
    return DataError(
        f"column {name!r} cannot be stacked into a batch ({error}). "
        + (f"Its samples have the shapes {' and '.join(shapes[:3])}. " if len(shapes) > 1 else "")
        + "Pad the samples to one length, or pass a data_collator that does, such as "
        "DataCollatorWithPadding(tokenizer)."
    )


def _shape(value: Any) -> str:
    """The shape of a value, for an error; empty if it is one number, or a nest that has no shape."""
    try:
        return str(list(np.shape(value))) if hasattr(value, "__len__") else ""
    except ValueError:
        return ""


def _stack_torch(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def _stack_numpy(values: list[Any]) -> np.ndarray[Any, Any]:
    return np.stack(values) if isinstance(values[0], np.ndarray) else np.array(values)


def _torch_labels(values: list[Any], sequences: bool) -> torch.Tensor:
    first = values[0]
    if sequences and isinstance(first, torch.Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.long if _whole(values, sequences) else torch.float)


def _numpy_labels(values: list[Any], sequences: bool) -> np.ndarray[Any, Any]:
    first = values[0]
    if sequences and isinstance(first, np.ndarray):
        return np.stack(values)
    return np.array(values, dtype=np.int64 if _whole(values, sequences) else np.float32)


def _whole(values: list[Any], sequences: bool) -> bool:
    """Return True if labels are class numbers, False if one of them is a regression target."""
    if sequences:
        return np.asarray(values).dtype.kind in "biu"
    numbers = (value.item() if isinstance(value, (torch.Tensor, np.ndarray)) else value for value in values)
    return all(isinstance(number, (int, np.integer)) for number in numbers)


def plain_collate(samples: list[Any]) -> Any:
    """PyTorch's `default_collate`, with a faster path for tuples of tensors."""
    first = samples[0]
    if (
        # Not subclasses: `default_collate` makes a named tuple of named tuples.
        type(first) is tuple
        and all(type(value) is torch.Tensor for value in first)
        and len(set(map(len, samples))) == 1
    ):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)


_FAST_WARNING = "Asking-to-pad-a-fast-tokenizer"


def pad_quietly(tokenizer: Any, features: Features, **options: Any) -> Any:
    """`tokenizer.pad` without its advice to call the tokenizer instead, which a collator cannot follow."""
    warnings = getattr(tokenizer, "deprecation_warnings", None)
    if warnings is None:  # a feature extractor
        return tokenizer.pad(features, **options)
    # How transformers remembers that it has given this advice.
    before = warnings.get(_FAST_WARNING, False)
    warnings[_FAST_WARNING] = True
    try:
        return tokenizer.pad(features, **options)
    finally:
        warnings[_FAST_WARNING] = before


def pad_rows(
    rows: list[Any], fill: int, side: str, width: int | None = None, multiple: int | None = None
) -> np.ndarray[Any, Any]:
    """Rows of integers as one int64 array of shape (rows, width), padded on `side`: by default to the widest row, and
    to a multiple of `multiple`.
    """
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    width = max(map(len, arrays)) if width is None else width
    width += -width % (multiple or 1)
    padded = np.full((len(arrays), width), fill, dtype=np.int64)
    for target, row in zip(padded, arrays, strict=True):
        start = 0 if side == "right" else width - len(row)
        target[start : start + len(row)] = row
    return padded


def attended(sample: Any, name: str) -> np.ndarray[Any, Any]:
    """A new int64 array of a sample's token ids or labels, without those that its `attention_mask` leaves out: padding,
    which does not belong to a sequence that is padded again or joined with others.
    """
    values = np.asarray(sample[name], dtype=np.int64).copy()
    return values[np.asarray(sample["attention_mask"], dtype=bool)] if "attention_mask" in sample else values


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
        # Samples of inference may have the column without labels.
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
        width = self.max_length if self.padding == "max_length" else None
        side, multiple = self.tokenizer.padding_side, self.pad_to_multiple_of
        return pad_rows(labels, self.label_pad_token_id, side, width, multiple)


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
