"""Losses of a script's own, and every loss of these runs computed by hand for one row after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.reliability.combined.models import NO_TARGET, VOCABULARY, pad
from tests.reliability.combined.recipe import Recipe
from torch import Tensor, nn

from windlass import LossTerms

FACTOR = 1.7
OF_FUNCTIONS = ("func", "func_mean", "func_factor")
OF_METHODS = ("method", "method_mean", "terms")


def pairs(recipe: Recipe, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (tokens, vocabulary) and the labels (tokens) that they are to predict."""
    if recipe.model == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.flatten(0, 1), labels.flatten()


def summed(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over targets."""
    logits, labels = pairs(recipe, logits, labels)
    return nn.functional.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(),
        labels,
        reduction="sum",
        ignore_index=NO_TARGET,
    )


def targets(recipe: Recipe, labels: Tensor) -> int:
    labels = labels[:, 1:] if recipe.model == "llama" else labels
    return int((labels != NO_TARGET).sum())


def logits_of(outputs: Any) -> Tensor:
    return outputs["logits"]  # type: ignore[no-any-return]


def loss_function(recipe: Recipe) -> Any:
    """`compute_loss_func` of this recipe, or None."""
    if recipe.loss not in OF_FUNCTIONS:
        return None

    def function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        count = num_items_in_batch
        if count is None or recipe.loss == "func_mean":
            count = targets(recipe, labels)
        factor = FACTOR if recipe.loss == "func_factor" else 1.0
        return factor * summed(recipe, logits_of(outputs), labels) / count

    return function


def overriding(base: type, recipe: Recipe) -> type:
    """A subclass of a trainer with the `compute_loss` of this recipe; the trainer itself if there is none."""
    if recipe.loss not in OF_METHODS:
        return base

    def loss_of(model: Any, inputs: Any, count: Any) -> tuple[Any, Any]:
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        total, own = summed(recipe, logits_of(outputs), labels), targets(recipe, labels)
        if recipe.loss == "terms":
            return LossTerms(total, own), outputs
        return total / (own if count is None else count), outputs

    def mean(self: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss, outputs = loss_of(model, inputs, None)
        return (loss, outputs) if return_outputs else loss

    def counted(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = loss_of(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    method = mean if recipe.loss == "method_mean" else counted
    return type(f"Own{base.__name__}", (base,), {"compute_loss": method})


def smoothed(recipe: Recipe, logits: Tensor, labels: Tensor, share: float) -> Tensor:
    """The sum over targets with this share of each spread over the vocabulary (arXiv:1512.00567)."""
    logits, labels = pairs(recipe, logits, labels)
    kept = labels != NO_TARGET
    logs = nn.functional.log_softmax(logits[kept].double(), -1)
    picked = logs.gather(-1, labels[kept, None])[:, 0]
    return -((1 - share) * picked + share * logs.sum(-1) / VOCABULARY).sum()


@torch.no_grad()
def evaluated_by_hand(recipe: Recipe, model: nn.Module, rows: Iterable[dict[str, list[int]]]) -> float:
    """The mean over all targets, one row at a time."""
    share = float(recipe.arguments.get("label_smoothing_factor", 0.0))
    total, count = 0.0, 0
    model.eval()
    for one in rows:
        batch = pad([one])
        logits, labels = logits_of(model(input_ids=batch["input_ids"])), batch["labels"]
        if recipe.adapter == "prompt":  # the last learnt token predicts the first of the row
            logits = logits[:, -labels.shape[1] - 1 :]
            labels = nn.functional.pad(labels, (1, 0), value=NO_TARGET)
        total += float(smoothed(recipe, logits, labels, share) if share else summed(recipe, logits, labels))
        count += targets(recipe, labels)
    return total / count * (FACTOR if recipe.loss == "func_factor" else 1.0)
