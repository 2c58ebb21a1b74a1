"""The rate that Adafactor sets by itself, shown as a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import optimization as reference

from windlass import Adafactor
from windlass.compat.schedule_table import AdafactorSchedule, get_adafactor_schedule


def _rates(module_adafactor: Any, schedule: Any, options: dict[str, Any]) -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = module_adafactor(model.parameters(), lr=None, relative_step=True, **options)
    shown = schedule(optimizer, 0.125)
    rates = [list(map(float, shown.get_lr()))]
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        rates.append(list(map(float, shown.get_lr())))
        shown.step()
    return rates


@pytest.mark.parametrize("warmup", [False, True])
def test_rates_are_those_of_the_reference(warmup: bool) -> None:
    options = {"scale_parameter": False, "warmup_init": warmup}
    found = _rates(Adafactor, AdafactorSchedule, options)
    assert found == _rates(reference.Adafactor, reference.AdafactorSchedule, options)
    assert found[0] == [0.125]


def test_scaled_rates_differ_by_the_size_of_a_parameter_after_the_update_instead_of_before() -> None:
    options = {"scale_parameter": True}
    found = _rates(Adafactor, get_adafactor_schedule, options)
    wanted = _rates(reference.Adafactor, reference.get_adafactor_schedule, options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.02, atol=0)
