"""What an overridden `training_step` divides its loss by."""

from __future__ import annotations

import pytest
import torch

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
