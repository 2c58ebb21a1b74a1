"""GrokAdamW against the package of that name."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.optim.helpers import assert_same, five_steps

from windlass.optim.optimizers.grokadamw import GrokAdamW


@pytest.mark.parametrize("clipping", [1.0, 0.0])
@pytest.mark.filterwarnings("ignore")
def test_five_updates_equal_the_package(clipping: float) -> None:
    level = logging.root.level, list(logging.root.handlers)
    package = pytest.importorskip("grokadamw")
    logging.root.level, logging.root.handlers = level  # which importing the package changed
    common = {"lr": 0.01, "weight_decay": 0.1, "gradient_clipping": clipping, "gamma": 0.2}
    assert_same(
        five_steps(lambda p: GrokAdamW(p, **common)),
        five_steps(lambda p: package.GrokAdamW(p, **common)),
        1e-5,
    )


def test_a_signal_shortens_the_slow_average() -> None:
    averages = []
    for signal in (0.0, 5.0):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = GrokAdamW([weight], gradient_clipping=0.0)
        optimizer.param_groups[0]["grokking_signal"] = signal
        weight.grad = torch.ones(2)
        optimizer.step()
        averages.append(optimizer.state[weight]["grok_ema"][0].item())
    assert averages == pytest.approx([1 - 0.98, 1 - 0.98 * 0.6065306], rel=1e-5)
