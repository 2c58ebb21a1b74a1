"""Parts of collators by the names that scripts import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from windlass.data.collate_default import default_data_collator
from windlass.data.collate_pad import Framework, pad_quietly

InputDataClass = Any
DataCollator = Callable[[list[Any]], Any]
DataCollatorMixin = Framework
pad_without_fast_tokenizer_warning = pad_quietly


def torch_default_data_collator(features: list[Any]) -> dict[str, Any]:
    """Samples stacked to a batch of tensors."""
    return default_data_collator(features, "pt")


def numpy_default_data_collator(features: list[Any]) -> dict[str, Any]:
    """Samples stacked to a batch of arrays."""
    return default_data_collator(features, "np")


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """A tensor, or anything that numpy takes, as an array on the host."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
