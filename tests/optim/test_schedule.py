"""Schedules against transformers' own, and against what makes them ours: nothing but the step counts."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optim.helpers import heard, parameters
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, ReduceLROnPlateau

from windlass.config import enums
from windlass.core.errors import ConfigError
from windlass.optim.public import get_scheduler
from windlass.optim.schedule import FactorSchedule, UserSchedule, as_schedule, build_schedule
from windlass.optim.schedules.registry import METRIC_DRIVEN, SCHEDULE_NAMES, SHAPES

OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "cosine": st.fixed_dictionaries({}, optional={"num_cycles": st.floats(0.1, 4)}),
    "cosine_with_restarts": st.fixed_dictionaries({}, optional={"num_cycles": st.integers(1, 5)}),
    "polynomial": st.fixed_dictionaries(
        {}, optional={"lr_end": st.floats(0, 0.05), "power": st.floats(0.5, 3)}
    ),
    "inverse_sqrt": st.fixed_dictionaries({}, optional={"timescale": st.integers(1, 100)}),
    "cosine_with_min_lr": st.one_of(
        st.fixed_dictionaries({"min_lr": st.floats(0, 0.1)}),
        st.fixed_dictionaries({"min_lr_rate": st.floats(0, 1)}, optional={"num_cycles": st.floats(0.1, 2)}),
    ),
    "cosine_warmup_with_min_lr": st.fixed_dictionaries(
        {"min_lr_rate": st.floats(0, 1)}, optional={"warmup_lr_rate": st.floats(0, 1)}
    ),
    "warmup_stable_decay": st.fixed_dictionaries(
        {"num_decay_steps": st.integers(0, 20), "num_stable_steps": st.integers(0, 20)},
        optional={
            "warmup_type": st.sampled_from(["linear", "cosine", "1-sqrt"]),
            "decay_type": st.sampled_from(["linear", "cosine", "1-sqrt"]),
            "min_lr_ratio": st.floats(0, 1),
        },
    ),
}


def recorded(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    lrs = []
    for _ in range(steps):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return lrs


@pytest.mark.filterwarnings("ignore:Both num_training_steps")  # theirs, not ours
@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data(), total=st.integers(1, 60), warmup=st.integers(0, 30), groups=st.integers(1, 3))
@settings(max_examples=60)
def test_equals_transformers_bit_for_bit(name: str, data: Any, total: int, warmup: int, groups: int) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    warmup = 0 if name == "constant" else min(warmup, total - 1)
    options = data.draw(OPTIONS.get(name, st.just({})))
    theirs_on, ours_on = parameters(groups=groups), parameters(groups=groups)
    theirs = optimization.get_scheduler(name, theirs_on, warmup, total, options)
    ours = build_schedule(name, ours_on, total_steps=total, warmup_steps=warmup, options=options)
    expected = recorded(theirs, theirs_on, total)
    for step in range(total):
        ours.set(step)
        assert [group["lr"] for group in ours_on.param_groups] == expected[step]
        assert ours.last_lrs() == expected[step]


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_but_the_step_counts(name: str) -> None:
    options = {"cosine_with_min_lr": {"min_lr": 0.01}, "cosine_warmup_with_min_lr": {"min_lr": 0.01}}.get(
        name, {}
    )
    options = {"num_decay_steps": 5} if name == "warmup_stable_decay" else options
    warmup = 0 if name == "constant" else 4
    schedule = build_schedule(
        name, parameters(groups=2), total_steps=30, warmup_steps=warmup, options=options
    )
    assert isinstance(schedule, FactorSchedule)
    in_order = [schedule.lrs(step) for step in range(30)]
    shuffled = random.Random(0).sample(range(30), 30)
    for step in shuffled:
        schedule.set(step)
        schedule.advance()
        assert schedule.last_lrs() == in_order[step]
    assert [lr / 0.1 for lr, _ in in_order] == pytest.approx([lr / 0.2 for _, lr in in_order])


def test_every_schedule_that_transformers_names_is_built() -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    assert set(SCHEDULE_NAMES) == {member.value for member in utils.SchedulerType}


def test_the_configuration_knows_the_same_schedules() -> None:
    assert {member.value for member in enums.SchedulerType} == set(SCHEDULE_NAMES)
    assert {member.value for member in enums.METRIC_DRIVEN} == METRIC_DRIVEN.keys()


def test_has_the_face_of_a_torch_scheduler() -> None:
    optimizer = parameters()
    schedule = build_schedule("linear", optimizer, total_steps=4)
    assert isinstance(schedule, LRScheduler)
    assert schedule.exposed is schedule
    assert schedule.last_epoch == 0
    schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.075)] == [optimizer.param_groups[0]["lr"]]
    assert schedule.base_lrs == [0.1]
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")


def test_resumed_schedule_follows_its_own_arguments() -> None:
    first = build_schedule("linear", parameters(), total_steps=10)
    first.set(4)
    second = build_schedule("linear", parameters(lr=1.0), total_steps=10)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == second._last_lr == [pytest.approx(0.6)]


def test_a_group_added_later_is_scheduled_from_its_own_rate() -> None:
    optimizer = parameters()
    schedule = build_schedule("linear", optimizer, total_steps=10)
    schedule.set(5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 4.0})
    schedule.set(5)
    assert schedule.last_lrs() == [pytest.approx(0.05), pytest.approx(2.0)]


def test_a_rate_kept_in_a_tensor_is_written_in_place() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    held = optimizer.param_groups[0]["lr"]
    schedule = build_schedule("linear", optimizer, total_steps=10)
    schedule.set(5)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linaer", {}, "did you mean 'linear'"),
        ("linear", {"num_cycles": 2}, "num_cycles=2: linear takes no options"),
        ("cosine", {"cycles": 2}, "cosine takes num_cycles"),
        ("polynomial", {"lr_end": 0.5}, "must be below the learning rate 0.1"),
        ("cosine_with_min_lr", {}, "exactly one of min_lr"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "exactly one of min_lr"),
        ("warmup_stable_decay", {}, "num_decay_steps=None: warmup_stable_decay needs it"),
        ("warmup_stable_decay", {"num_decay_steps": 9}, "longer than the run (10 updates)"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 1, "decay_type": "x"},
            "decay_type='x': must be one of linear",
        ),
        ("reduce_lr_on_plateau", {"factor": 2}, "below|should be < 1"),
        ("greedy", {"mode": "up"}, "mode must be 'min' or 'max'"),
        ("greedy", {"patients": 3}, "greedy takes mode"),
        # What would end in an error, or in a wrong rate, once the warm-up or the first evaluation is over.
        ("cosine", {"num_cycles": "0.5"}, "num_cycles='0.5': must be a number"),
        ("cosine", {"num_cycles": None}, "num_cycles=None: must be a number"),
        ("cosine_with_min_lr", {"min_lr": float("nan")}, "min_lr=nan: must be a number"),
        ("polynomial", {"power": -1}, "power=-1: must be at least 0"),
        ("inverse_sqrt", {"timescale": 0}, "timescale=0: must be above 0"),
        ("warmup_stable_decay", {"num_decay_steps": -2}, "num_decay_steps=-2: must be at least 0"),
        ("reduce_lr_on_plateau", {"patience": "1"}, "patience='1': must be a number"),
        ("greedy", {"smooth": "false"}, "smooth='false': must be true or false"),
        ("greedy", {"min_lr": [0.0, "1"]}, "min_lr=[0.0, '1']: must be a number"),
        ("greedy", {"factor": 0}, "factor must be above 0 and below 1"),
        ("greedy", {"window_size": 0}, "window_size must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(name, parameters(), total_steps=10, warmup_steps=2, options=options)
    assert any(part in str(caught.value) for part in message.split("|"))


def test_a_floor_needs_a_peak_to_be_a_share_of() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(ConfigError, match=r"learning_rate=0.0: .*min_lr=0.01 needs a learning rate above 0"):
        build_schedule("cosine_with_min_lr", optimizer, total_steps=10, options={"min_lr": 0.01})


def test_a_warmup_without_effect_is_warned_of() -> None:
    with heard() as records:
        build_schedule("constant", parameters(), total_steps=10, warmup_steps=7)
        build_schedule("constant_with_warmup", parameters(), total_steps=10, warmup_steps=8)
    assert len(records) == 1
    assert "warmup_steps=7 has no effect" in records[0].getMessage()


@pytest.mark.parametrize("name", METRIC_DRIVEN)
@given(
    metrics=st.lists(st.floats(-5, 5), max_size=60),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
)
@settings(max_examples=60)
def test_metric_driven_equal_transformers(
    name: str, metrics: list[float], patience: int, cooldown: int, mode: str
) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    options: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "mode": mode, "factor": 0.5}
    if name == "greedy":
        options |= {
            "min_lr": 0.05,
            "max_lr": 0.3,
            "reset_start": 2,
            "smooth": cooldown == 1,
            "window_size": 3,
            "warmup": 1,
        }
    theirs_on, ours_on = parameters(groups=2), parameters(groups=2)
    theirs = optimization.get_scheduler(name, theirs_on, scheduler_specific_kwargs=options)
    ours = build_schedule(name, ours_on, total_steps=100, options=options)
    half = len(metrics) // 2
    for index, metric in enumerate(metrics):
        if index == half:  # continue in new objects from the state, as a resumed run does
            resumed_on = parameters(groups=2)
            resumed_on.load_state_dict(ours_on.state_dict())
            state = ours.state_dict()
            ours_on = resumed_on
            ours = build_schedule(name, ours_on, total_steps=100, options=options)
            ours.load_state_dict(state)
        theirs.step(metric)
        ours.set(index)
        ours.advance()
        ours.observe(metric)
        assert [g["lr"] for g in ours_on.param_groups] == [g["lr"] for g in theirs_on.param_groups]


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_counts_as_long_as_it_is_in_the_window(metric: float) -> None:
    options = {"patience": 0, "smooth": True, "window_size": 2, "factor": 0.5, "min_lr": 1e-9, "max_lr": 9.0}
    optimizer = parameters()
    schedule = build_schedule("greedy", optimizer, total_steps=9, options=options)
    rates = []
    for value in (3.0, metric, 2.0, 1.0, 0.5):
        schedule.observe(value)
        rates.append(optimizer.param_groups[0]["lr"])
    first = rates[0]
    assert rates == [first, first / 2, first / 4, first / 2, first]


@pytest.mark.parametrize("name", ["greedy", "reduce_lr_on_plateau"])
def test_a_schedule_of_a_metric_takes_groups_that_are_added(name: str) -> None:
    optimizer = parameters()
    schedule = build_schedule(
        name, optimizer, total_steps=9, options={"patience": 0, "factor": 0.5, "min_lr": 0.06}
    )
    schedule.observe(1.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.08})
    for metric in (2.0, 3.0, 4.0):
        schedule.observe(metric)
    assert [group["lr"] for group in optimizer.param_groups] == [0.06, 0.06]


@pytest.mark.parametrize(("verbose", "level"), [(True, "WARNING"), (False, "INFO")])
def test_greedy_tells_of_its_changes(verbose: bool, level: str) -> None:
    options = {"patience": 0, "verbose": verbose, "factor": 0.5, "max_lr": 0.2}
    with heard(logging.INFO) as records:
        schedule = build_schedule("greedy", parameters(), total_steps=9, options=options)
        schedule.observe(3.0)
        schedule.observe(2.0)  # the second rise meets the upper bound: nothing changes, nothing is said
    assert [(record.levelname, record.getMessage()) for record in records] == [
        (level, "greedy: evaluation 1 raised the learning rates: [0.2]")
    ]


def test_a_users_scheduler_keeps_its_identity_and_its_own_count() -> None:
    optimizer = parameters()
    theirs = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    schedule = as_schedule(theirs, optimizer)
    assert schedule.exposed is theirs
    seen = []
    for step in range(4):
        schedule.set(step)
        seen.append(schedule.last_lrs()[0])
        optimizer.step()
        if step != 1:  # the update of step 1 was skipped
            schedule.advance()
    assert seen == pytest.approx([0.1, 0.05, 0.05, 0.1 / 3])
    assert theirs.last_epoch == 3


def test_our_own_schedules_are_not_wrapped_again() -> None:
    optimizer = parameters()
    ours = build_schedule("linear", optimizer, total_steps=3)
    assert as_schedule(ours, optimizer) is ours


def test_a_users_scheduler_that_follows_a_metric_is_not_stepped_by_updates() -> None:
    optimizer = parameters()
    schedule = UserSchedule(ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    assert schedule.follows_metric
    for step in range(5):
        schedule.set(step)
        schedule.advance()
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.observe(1.0)
    schedule.observe(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_rate_that_a_callback_wrote_is_the_one_reported() -> None:
    optimizer = parameters()
    schedule = build_schedule("linear", optimizer, total_steps=10)
    schedule.set(2)
    optimizer.param_groups[0]["lr"] = 0.003
    assert schedule.last_lrs() == [0.003]


@pytest.mark.parametrize("in_tensor", [False, True])
def test_what_a_script_changed_between_two_updates_is_saved(in_tensor: bool) -> None:
    def made(lr: float) -> Any:
        optimizer = parameters(lr=lr)
        if in_tensor:
            optimizer.param_groups[0]["lr"] = torch.tensor(lr)
        return optimizer, build_schedule("linear", optimizer, total_steps=10)

    optimizer, schedule = made(0.1)
    schedule.set(0)
    schedule.end_update(1)
    assert schedule.last_lrs() == [pytest.approx(0.1)]
    assert schedule.state_dict() == {"step": 1}
    if in_tensor:
        optimizer.param_groups[0]["lr"].fill_(0.5)
    else:
        optimizer.param_groups[0]["lr"] = 0.5
    schedule.base_lrs[0] = 0.2
    other, resumed = made(1.0)
    resumed.load_state_dict(schedule.state_dict())
    for each, group in ((schedule, optimizer.param_groups[0]), (resumed, other.param_groups[0])):
        each.set(1)
        assert float(group["lr"]) == 0.5
        each.end_update(2)
        assert float(group["lr"]) == pytest.approx(0.16)


def test_a_users_scheduler_over_a_tensor_rate_reports_the_updates_own() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    schedule = UserSchedule(LambdaLR(optimizer, lambda step: 1 / (step + 1)))
    schedule.set(0)
    optimizer.step()
    schedule.advance()
    assert schedule.last_lrs() == [0.5]
    schedule.set(1)
    assert schedule.last_lrs() == [0.25]


class Wrapper:
    """What libraries that wrap schedulers look like: a `step` that takes anything."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.optimizer = inner, inner.optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.inner.step(*args, **kwargs)


def test_a_wrapped_scheduler_is_stepped_by_updates() -> None:
    optimizer = parameters()
    schedule = UserSchedule(Wrapper(LambdaLR(optimizer, lambda step: 1 / (step + 1))))
    assert not schedule.follows_metric
    optimizer.step()
    schedule.advance()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_state_of_a_users_scheduler_is_plain_and_comes_back() -> None:
    optimizer = parameters()
    schedule = UserSchedule(MultiStepLR(optimizer, milestones=[2, 4], gamma=0.1))
    for step in range(3):
        schedule.set(step)
        optimizer.step()
        schedule.advance()
    state = schedule.state_dict()
    assert type(state["milestones"]) is dict
    again_on = parameters()
    again = UserSchedule(MultiStepLR(again_on, milestones=[2, 4], gamma=0.1))
    again_on.load_state_dict(optimizer.state_dict())
    again.load_state_dict(state)
    for both in (schedule, again):
        for step in range(3, 6):
            both.set(step)
            both.optimizer.step()
            both.advance()
    assert again_on.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("name", ["greedy", "reduce_lr_on_plateau"])
def test_the_state_of_a_schedule_over_one_group_is_loaded_for_several(name: str) -> None:
    """Earlier versions had one group if there was no weight decay."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    one = build_schedule(name, torch.optim.SGD(weights, lr=0.1), total_steps=9, options={"patience": 0})
    two_groups = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    two = build_schedule(name, two_groups, total_steps=9, options={"patience": 0})
    for metric in (1.0, 2.0):
        one.observe(metric)
    two.load_state_dict(one.state_dict())
    rate = one.optimizer.param_groups[0]["lr"]
    for schedule in (one, two):
        for group in schedule.optimizer.param_groups:  # comes with the optimizer's state
            group["lr"] = rate
        schedule.observe(3.0)
        schedule.set(3)
    assert two.last_lrs() == one.last_lrs() * 2


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
@pytest.mark.parametrize("name", SHAPES)
def test_a_copy_goes_on_by_itself(name: str, copied: Any) -> None:
    options = {"cosine_with_min_lr": {"min_lr": 0.01}, "warmup_stable_decay": {"num_decay_steps": 3}}
    options["cosine_warmup_with_min_lr"] = options["cosine_with_min_lr"]
    ours = build_schedule(
        name,
        parameters(),
        total_steps=10,
        warmup_steps=0 if name == "constant" else 2,
        options=options.get(name),
    )
    torchs = get_scheduler(name, parameters(), 2, 10, options.get(name))
    for schedule in (ours, torchs):
        assert [f(4) for f in schedule.lr_lambdas] == [f(4) for f in ours.lr_lambdas]
        schedule.step()
        other = copied(schedule)
        assert other.optimizer is not schedule.optimizer
        for _ in range(6):
            schedule.step()
            other.step()
            assert other.get_last_lr() == schedule.get_last_lr()
            assert other.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
