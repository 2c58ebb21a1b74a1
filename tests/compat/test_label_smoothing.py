"""The object that scripts call for a smoothed loss, beside the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother as Reference

from windlass.trainer.losses import LabelSmoother


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("ignore", [-100, 4])
def test_losses_are_those_of_the_reference(ignore: int, shift: bool, count: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 5, generator=generator)
    labels = torch.randint(0, 5, (3, 6), generator=generator)
    labels[0, :2] = ignore
    for outputs in ({"logits": logits}, (logits,)):
        found, wanted = (
            smoother(0.2, ignore)(outputs, labels.clone(), shift_labels=shift, num_items_in_batch=count)
            for smoother in (LabelSmoother, Reference)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert LabelSmoother() == LabelSmoother(0.1, -100)
