"""Schedule-free optimizers against the schedulefree package, and the exactness of their two modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.helpers import assert_same, five_steps

from windlass.core.errors import ModelError
from windlass.optim.optimizers.schedule_free import (
    ScheduleFree,
    ScheduleFreeAdamW,
    ScheduleFreeRAdam,
    ScheduleFreeSGD,
)
from windlass.optim.schedule import warmup_of_schedule

PEERS = [
    (ScheduleFreeAdamW, "AdamWScheduleFree", {"warmup_steps": 3, "r": 0.5}),
    (ScheduleFreeRAdam, "RAdamScheduleFree", {}),
    (ScheduleFreeRAdam, "RAdamScheduleFree", {"silent_sgd_phase": False}),
    (ScheduleFreeSGD, "SGDScheduleFree", {"warmup_steps": 2, "momentum": 0.8}),
]


@pytest.mark.parametrize(("cls", "peer", "options"), PEERS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_updates_equal_the_package(cls: Any, peer: str, options: dict[str, Any], mode: str) -> None:
    package = pytest.importorskip("schedulefree")
    common = {"lr": 0.05, "weight_decay": 0.1, **options}
    made: dict[str, Any] = {}

    def make(kind: str, of: Any, parameters: Any) -> torch.optim.Optimizer:
        made[kind] = of(parameters, **common)
        made[kind].train()
        return made[kind]  # type: ignore[no-any-return]

    ours = five_steps(lambda p: make("ours", cls, p), steps=8)
    theirs = five_steps(lambda p: make("theirs", getattr(package, peer), p), steps=8)
    for optimizer in made.values():
        getattr(optimizer, mode)()
    assert_same(ours, theirs)


def trained(cls: type[ScheduleFree], evaluate: bool) -> list[torch.Tensor]:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer = cls([weight])  # type: ignore[call-arg]
    seen = []
    for step in range(6):
        weight.grad = 0.1 * weight.detach() + 0.01 * step
        optimizer.step()
        if evaluate:
            before = weight.detach().clone()
            optimizer.eval()
            assert not torch.equal(before, weight) or step == 0
            optimizer.eval()  # a second call changes nothing
            optimizer.train()
            assert torch.equal(before, weight)
            assert optimizer.state[weight].keys() <= {"z", "exp_avg_sq"}
        seen.append(weight.detach().clone())
    return seen


@pytest.mark.parametrize("cls", [ScheduleFreeAdamW, ScheduleFreeSGD])
def test_evaluations_change_no_bit_of_training(cls: type[ScheduleFree]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained(cls, True), trained(cls, False), strict=True))


def test_evaluation_before_the_first_update_sees_the_weights_as_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFreeSGD([weight])
    optimizer.eval()
    optimizer.train()
    assert weight.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("cls", "options", "named"),
    [
        (ScheduleFreeAdamW, {"betas": (0.0, 0.999)}, r"betas=.*first \(adam_beta1\)"),
        (ScheduleFreeSGD, {"momentum": 0.0}, "momentum=0.0"),
    ],
)
def test_an_average_that_has_no_weight_is_refused_before_training(cls: Any, options: Any, named: str) -> None:
    """It is computed from what is trained, by the inverse of its weight: an evaluation would fail, and a save."""
    with pytest.raises(ValueError, match=f"{named}.* must be above 0 and below 1"):
        cls([torch.nn.Parameter(torch.ones(2))], **options)


def test_a_silent_phase_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adam_beta2\) must be above 0.6, or no update is ever made"):
        ScheduleFreeRAdam([torch.nn.Parameter(torch.ones(2))], betas=(0.9, 0.6))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFreeRAdam([weight], betas=(0.9, 0.61))
    for _ in range(20):
        weight.grad = torch.ones(2)
        optimizer.step()
    assert weight.tolist() != [1, 1]


def test_an_update_in_evaluation_mode_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFreeSGD([weight])
    optimizer.eval()
    with pytest.raises(ModelError, match=r"call optimizer\.train\(\) after optimizer\.eval\(\)"):
        optimizer.step()


@pytest.mark.parametrize(("schedule", "own"), [("constant", 7), ("linear", 0)])
def test_the_optimizer_warms_up_only_if_the_schedule_does_not(schedule: str, own: int) -> None:
    optimizer = ScheduleFreeAdamW([torch.nn.Parameter(torch.ones(2))])
    left = warmup_of_schedule(schedule, 7, optimizer)
    assert (optimizer.param_groups[0]["warmup_steps"], left) == (own, 7 - own)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_warmup_that_a_script_gave_the_optimizer_stays(schedule: str) -> None:
    optimizer = ScheduleFreeAdamW([torch.nn.Parameter(torch.ones(2))], warmup_steps=3)
    assert warmup_of_schedule(schedule, 7, optimizer) == 0
    assert optimizer.param_groups[0]["warmup_steps"] == 3
