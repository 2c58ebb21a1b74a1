"""Replicated data parallelism, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch, on_ranks
from torch import Tensor, nn

from windlass.config.plan import DistPlan
from windlass.core.world import world_from_environment
from windlass.dist.gang import current, join, leave
from windlass.transforms.ddp import DataParallel


@pytest.mark.dist
def test_compression_and_unused_parameters() -> None:
    said = launch(2, Path(__file__).with_name("ddp_ranks.py"))
    assert said.count("replicas are right") == 2


@pytest.mark.dist
def test_a_wrapper_made_in_the_middle_of_a_run_sums_to_the_same_bits() -> None:
    """As that of a loop of the user's own, which is resumed and has no batch before its first."""
    on_ranks(3, main)


# --- what each rank runs ----------------------------------------------------------------------------------------------


UPDATES = 6


class Crossed(nn.Module):
    """Gradients arrive in another order than that of the parameters. The buffer is one that PyTorch does not send."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(16, 5), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(1))  # which every forward of the wrapper shares
        self.register_buffer("history", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) * self.scale


def train(rank: int, plan: DistPlan, cuts: set[int]) -> list[Tensor]:
    """Weights at the end, of a run that is resumed at the updates in `cuts`."""
    model = Crossed()
    strategy = DataParallel(model, plan, current())
    for update in range(UPDATES):
        if update in cuts:
            resumed = Crossed()
            resumed.load_state_dict(model.state_dict())
            strategy.release()
            model, strategy = resumed, DataParallel(resumed, plan, current())
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * update + rank))
        strategy.model(inputs).square().sum().backward()
        strategy.check_reached()
        strategy.check_used()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    strategy.release()
    return [p.detach().clone() for p in model.parameters()]


def main() -> None:
    world = world_from_environment()
    join(world, torch.device("cpu"), timeout_seconds=60)
    for searches in (False, True):
        plan = DistPlan("ddp", find_unused_parameters=searches)
        whole = train(world.rank, plan, set())
        for cut in range(1, UPDATES):
            resumed = train(world.rank, plan, {cut})
            assert all(map(torch.equal, resumed, whole)), f"searches={searches}, resumed at update {cut}"
    leave()
