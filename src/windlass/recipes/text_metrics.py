"""Metrics of what a recipe's model predicts: accuracy of classes, and scores of generated text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.core.types import EvalPrediction
from windlass.metrics.answer_scores import scores_of_set
from windlass.recipes.schema import RecipeParts

if TYPE_CHECKING:
    from torch import Tensor

# What the final weights generate, one text a line, in the run's folder.
PREDICTIONS = "predictions.txt"


def decoded(tokenizer: Any, ids: Any) -> list[str]:
    """The texts of token ids, an array of shape (samples, tokens) padded with -100; each on one line."""
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def of_predictions(
    tokenizer: Any, metric: str, references: Sequence[str]
) -> Callable[[EvalPrediction], dict[str, float]]:
    """`compute_metrics` of this score of texts, against the references of the set that is generated for. What its
    labels say is less: they are cut to `data.max_length`, and a tokenizer may lose capitals and rare characters.
    """

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts = decoded(tokenizer, prediction.predictions)
        # A dry run generates for the first rows alone.
        return scores_of_set([metric], texts, references[: len(texts)])

    return compute_metrics


def generated_set(trainer: Any, parts: RecipeParts) -> tuple[Any, str]:
    """Return the set that the final weights generate for, the test data or else the evaluation data, with the prefix of
    its metrics; the trainer computes them with its references from now on.
    """
    found, prefix = (parts.evaluation, "eval") if parts.test is None else (parts.test, "test")
    if found is not None:
        assert parts.recipe.metric is not None
        trainer.compute_metrics = of_predictions(parts.tokenizer, parts.recipe.metric, found.targets)
    return found, prefix


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def predicted_class(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Reduce logits to the predicted class on the device."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


# What a trainer needs for it.
ACCURACY: dict[str, Any] = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": predicted_class}
