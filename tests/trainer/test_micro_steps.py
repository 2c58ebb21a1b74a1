"""What an overridden `training_step` divides its loss by, which loss is logged, and gradients of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, rows, settings
from tests.trainer.test_losses import refused, trainer_for, weights
from torch import Tensor

from windlass import Trainer, TrainingArguments
from windlass.core.errors import ModelError
from windlass.trainer.micro_steps import StepCheck


def check(asked: int = 3, name: str = "gradient_accumulation_steps") -> StepCheck:
    step = StepCheck(frozenset({name} if name else ()), asked)
    step.returned = torch.tensor(1.0, dtype=torch.bfloat16)
    return step


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", ""])
@pytest.mark.parametrize("by", [2, 3])
def test_a_division_that_is_not_seen_is_refused_also_in_bfloat16(by: int, name: str) -> None:
    """There are 2 micro-batches in an update for which 3 were asked."""
    step = check(3, name)
    with pytest.raises(ModelError, match=rf"divides the loss by {by} .* in a way that is not seen"):
        step.check(torch.tensor(1.0, dtype=torch.bfloat16) / by, 2)


def test_a_step_that_names_the_accumulation_and_changes_the_loss_otherwise_is_refused() -> None:
    with pytest.raises(ModelError, match=r"names gradient_accumulation_steps .* nor a part of 3 of it"):
        check().check(torch.tensor(0.5), 3)


def test_a_step_that_does_not_may_change_the_loss() -> None:
    step = check(name="")
    step.check(torch.tensor(0.6), 3)
    assert step.passed


@pytest.mark.parametrize("loss", [0.0, math.nan])
def test_a_loss_that_shows_nothing_does_not_decide(loss: float) -> None:
    step = check()
    step.returned = torch.tensor(loss)
    step.check(torch.tensor(loss), 3)
    step.returned = torch.tensor(1.0)
    step.check(torch.tensor(1.0), 1)
    assert not step.passed
    step.returned = torch.tensor(1.0)
    step.check(torch.tensor(1.0), 2)
    assert step.passed


def test_a_step_with_two_backwards_is_told_what_is_logged(tmp_path: Path, said: list[str]) -> None:
    class Adversarial(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            super().training_step(*args, **kwargs)
            return loss

    args = TrainingArguments(**settings(tmp_path, max_steps=1, log_level="warning"))
    losses = []
    for kind in (Trainer, Adversarial):
        torch.manual_seed(0)
        losses.append(kind(Net(), args, train_dataset=rows(4)).train().training_loss)
    assert losses[1] == pytest.approx(2 * losses[0])
    assert sum("the loss in the logs is the sum" in line for line in said) == 1


# --- gradients that a step computes by itself -------------------------------------------------------------------------


class RawBackward(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


class OwnGradients(Trainer):
    """As methods do that change gradients, or estimate them without a backward."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss.detach()


class WithoutLoss(OwnGradients):
    def training_step(self, *args: Any, **kwargs: Any) -> None:
        super().training_step(*args, **kwargs)


class WithoutGradients(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return self.compute_loss(model, self._prepare_inputs(inputs))


@pytest.mark.parametrize("kind", [RawBackward, OwnGradients])
def test_gradients_of_a_step_of_its_own_train_as_those_of_the_default_one(
    kind: type[Trainer], folder: Path
) -> None:
    own, default = (trainer_for(folder, chosen, logging_steps=1) for chosen in (kind, Trainer))
    own.train()
    default.train()
    assert weights(own) == weights(default)
    losses = [[row.get("loss") for row in trainer.state.log_history] for trainer in (own, default)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (RawBackward, {"gradient_accumulation_steps": 2}),
        (RawBackward, {"optim": "lomo"}),
        (WithoutGradients, {}),
    ],
)
def test_a_step_without_the_backward_of_the_accelerator_is_refused(
    kind: type[Trainer], changes: dict[str, Any], folder: Path
) -> None:
    words = r"without calling `self\.accelerator\.backward\(loss\)`"
    refused(trainer_for(folder, kind, **changes), ModelError, words)


def test_a_step_with_gradients_of_its_own_returns_its_loss(folder: Path) -> None:
    refused(trainer_for(folder, WithoutLoss), ModelError, "must return its loss.*returned NoneType")
