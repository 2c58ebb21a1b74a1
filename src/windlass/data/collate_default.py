"""Stacking samples that need no padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Dict samples as `default_data_collator` makes them; tuples, tensors and numbers as PyTorch's
    `default_collate` does.
    """
    if isinstance(samples[0], Mapping):
        return _collated(samples, _stack_torch, _torch_labels)
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
    shapes = sorted({str(list(np.shape(value))) for value in values if hasattr(value, "__len__")})
    return DataError(
        f"column {name!r} cannot be stacked into a batch ({error}). "
        + (f"Its samples have the shapes {' and '.join(shapes[:3])}. " if len(shapes) > 1 else "")
        + "Pad the samples to one length, or pass a data_collator that does, such as "
        "DataCollatorWithPadding(tokenizer)."
    )


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
    return torch.tensor(values, dtype=torch.long if _whole(first, sequences) else torch.float)


def _numpy_labels(values: list[Any], sequences: bool) -> np.ndarray[Any, Any]:
    first = values[0]
    if sequences and isinstance(first, np.ndarray):
        return np.stack(values)
    return np.array(values, dtype=np.int64 if _whole(first, sequences) else np.float32)


def _whole(first: Any, sequences: bool) -> bool:
    """Return True if labels are class numbers, False if they are regression targets."""
    value = first[0] if sequences else first
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.item()
    return isinstance(value, (int, np.integer))


def plain_collate(samples: list[Any]) -> Any:
    """PyTorch's `default_collate`, with a faster path for tuples of tensors."""
    first = samples[0]
    if (
        type(first) is tuple
        and all(type(value) is torch.Tensor for value in first)
        and len(set(map(len, samples))) == 1
    ):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)
