from __future__ import annotations

import torch
from transformers import optimization as reference

from windlass.compat import schedule_table as ours


def test_every_schedule_has_its_function() -> None:
    found = {kind.value: function.__name__ for kind, function in ours.TYPE_TO_SCHEDULER_FUNCTION.items()}
    wanted = {
        kind.value: function.__name__ for kind, function in reference.TYPE_TO_SCHEDULER_FUNCTION.items()
    }
    assert found == wanted
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = ours.TYPE_TO_SCHEDULER_FUNCTION["linear"](optimizer, 2, 4)  # type: ignore[index]
    assert schedule.get_last_lr() == [0.0]


def test_rolling_means_are_those_of_the_reference() -> None:
    found, wanted = ours.StreamingAverage(3), reference.StreamingAverage(3)
    for value in (1.0, 2.0, 4.0, 8.0, 16.0):
        assert found.streamavg(value) == wanted.streamavg(value)
    assert found.state_dict() == wanted.state_dict()
    again = ours.StreamingAverage(1)
    again.load_state_dict(wanted.state_dict())
    assert again.streamavg(2.0) == wanted.streamavg(2.0)
