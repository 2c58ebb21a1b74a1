"""A preference trainer as a script writes it: direct preference optimisation with a frozen reference model.

Rafailov et al., arXiv:2305.18290. Its data are pairs of token sequences, `chosen` and `rejected`, of one length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass import Trainer, TrainingArguments


class PreferenceTrainer(Trainer):
    """Trains `model` to prefer what was chosen, without leaving the reference far behind.

    Args:
        ref_model: what `model` is compared with; a copy of it as it is now, if it is left out.
        beta: how strongly the model is held to the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        ref_model: nn.Module | None = None,
        beta: float = 0.5,
        **options: Any,
    ) -> None:
        reference = copy.deepcopy(model) if ref_model is None else ref_model
        super().__init__(model, args, **options)
        self.beta, self.can_return_loss = beta, True
        self.ref_model = self.accelerator.prepare(reference.eval().requires_grad_(False))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean over pairs of `-log sigmoid(beta * (difference of the log-ratios to the reference))`."""
        margins = self.rewards(model, inputs)
        loss = -F.logsigmoid(margins).mean()
        return (loss, {"margins": margins.detach()}) if return_outputs else loss

    def rewards(self, model: nn.Module, pairs: Mapping[str, Tensor]) -> Tensor:
        """By how much the model rewards each chosen sequence more than the rejected one, as [pairs]."""
        # One forward for both: a sharded model gathers its weights once.
        tokens = torch.cat([pairs["chosen"], pairs["rejected"]])
        own = log_probability(model, tokens)
        with torch.no_grad():
            reference = log_probability(self.ref_model, tokens)
        chosen, rejected = (own - reference).chunk(2)
        return self.beta * (chosen - rejected)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, margins, and a label for each pair, so that `compute_metrics` is called."""
        loss, margins, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, margins, None if margins is None else torch.ones_like(margins)


def log_probability(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each sequence [sequences, length]. The model returns logits [sequences, length, vocabulary], or outputs that
    have them.
    """
    outputs = model(tokens[:, :-1])
    predicted = getattr(outputs, "logits", outputs).log_softmax(-1)
    return predicted.gather(-1, tokens[:, 1:, None]).sum((1, 2))


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of pairs whose chosen sequence the model rewards more."""
    return {"accuracy": float((prediction.predictions > 0).mean())}
