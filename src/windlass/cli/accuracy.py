"""The accuracy of a model that predicts one class for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from windlass.core.types import EvalPrediction


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of correct predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def predicted_class(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Reduce logits to the predicted class on the device."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


# What a trainer needs for it.
ACCURACY: dict[str, Any] = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": predicted_class}
