"""Shared types refuse what would be misread later."""

from __future__ import annotations

import pytest
import torch

from windlass import LossTerms, ModelError


@pytest.mark.parametrize("name", ["loss", "grad_norm", "step"])
def test_a_part_of_a_loss_cannot_take_a_reports_name(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        LossTerms(torch.tensor(1.0), 1.0, {name: torch.tensor(0.0)})
