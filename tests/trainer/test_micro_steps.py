"""What an overridden `training_step` divides its loss by, which loss is logged, and gradients of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, rows, settings
from tests.trainer.test_losses import refused, trainer_for, weights
from torch import Tensor

from windlass import Trainer, TrainingArguments
from windlass.core.errors import ModelError
from windlass.trainer.micro_steps import StepDivision


def division(number: int = 3) -> StepDivision:
    return StepDivision(frozenset({"gradient_accumulation_steps"}), number)


def test_a_division_in_bfloat16_is_seen() -> None:
    step, loss = division(), torch.tensor(1.0, dtype=torch.bfloat16)
    step.returned(loss)
    step.decide(loss / 3, 3)
    assert step.by(3) == 3


def test_a_step_that_names_the_accumulation_and_changes_the_loss_otherwise_is_refused() -> None:
    step, loss = division(), torch.tensor(1.0)
    step.returned(loss)
    with pytest.raises(ModelError, match=r"names gradient_accumulation_steps .* nor a part of 3 of it"):
        step.decide((loss + 0.5) / 3, 3)


def test_without_accumulation_a_step_may_change_the_loss() -> None:
    step, loss = division(1), torch.tensor(1.0)
    step.returned(loss)
    step.decide(loss + 0.5, 1)
    assert step.by(1) == 1


@pytest.mark.parametrize(("divisor", "first"), [(2, 3), (2, 2), (3, 3), (3, 2), (1, 1), (3, 1)])
def test_which_of_two_numbers_divides_shows_in_a_shorter_update(divisor: int, first: int) -> None:
    """`first` micro-batches are in the first update; 3 are asked for, and the last update has `shorter`."""
    step = StepDivision(frozenset({"gradient_accumulation_steps", "current_gradient_accumulation_steps"}), 3)
    shorter = min(divisor, 2)
    for micro_batches in (first, 3, shorter, 3, shorter):
        by = 3 if divisor == 3 else micro_batches
        if not step.is_decided(micro_batches):
            step.returned(1.0)
            step.decide(1.0 / by, micro_batches)
        assert step.by(micro_batches) == by
    assert step.is_decided(1)
    assert step.is_decided(2)


def test_a_step_that_divides_in_some_updates_only_is_refused() -> None:
    step = StepDivision(frozenset({"gradient_accumulation_steps", "current_gradient_accumulation_steps"}), 3)
    step.returned(1.0)
    step.decide(1.0 / 3, 3)
    step.returned(1.0)
    with pytest.raises(ModelError, match="neither that loss nor a part of 3 of it"):
        step.decide(1.0, 2)


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
