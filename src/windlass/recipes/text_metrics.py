"""Metrics of what a recipe's model predicts: accuracy of classes, and scores of generated text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from windlass.core.types import EvalPrediction
from windlass.metrics.answer_scores import scores_of_set

# What the final weights generate, one text a line, in the run's folder.
PREDICTIONS = "predictions.txt"


def decoded(tokenizer: Any, ids: Any) -> list[str]:
    """The texts of token ids, an array of shape (samples, tokens) padded with -100; each on one line."""
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def of_predictions(tokenizer: Any, metric: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """`compute_metrics` of this score of texts."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts, references = prediction.predictions, prediction.label_ids
        return scores_of_set([metric], decoded(tokenizer, texts), decoded(tokenizer, references))

    return compute_metrics


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of correct predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def predicted_class(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Reduce logits to the predicted class on the device."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


# What a trainer needs for it.
ACCURACY: dict[str, Any] = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": predicted_class}
