"""What an overridden `training_step` divides its loss by, and which loss is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, rows, settings
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
