"""The table of cross-option rules, and the plan that comes out when all of them hold."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass import TrainingArguments
from windlass.assemble.resolve import resolve_call, resolve_duration, resolve_run
from windlass.assemble.rules import Facts, Progress
from windlass.config.parallel.keys import Settings
from windlass.config.parallel.parallel_plan import Parallel, plan_parallel
from windlass.config.plan import CompilePlan, PrecisionPlan, RunPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World

FACTS = Facts(10)


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, **changes)


def resolve(args: TrainingArguments, facts: Facts = FACTS, world: World = World()) -> RunPlan:  # noqa: B008 (frozen)
    return resolve_run(args, resolve_call(args, world), facts)


def plan_of(facts: Facts = FACTS, **changes: Any) -> RunPlan:
    return resolve(arguments(**changes), facts)


REFUSED = [
    ({}, {"has_training_data": False}, "train_dataset"),
    ({"eval_strategy": "epoch"}, {"has_evaluation_data": False}, "eval_strategy"),
    ({}, {"groups_per_epoch": None}, "max_steps"),
    ({"max_steps": 10**10}, {}, "max_steps"),
    ({"num_train_epochs": 10**10}, {}, "num_train_epochs"),
    ({"bf16_full_eval": True, "eval_strategy": "epoch"}, {}, "bf16_full_eval"),
    ({"ddp_find_unused_parameters": True, "ddp_static_graph": True}, {}, "ddp_find_unused_parameters"),
    ({}, {"uncalled": {"_run_epoch": "override `training_step`"}}, "_run_epoch"),
]


@pytest.mark.parametrize(("changes", "facts", "field"), REFUSED)
def test_each_rule_refuses_by_name(changes: dict[str, Any], facts: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(dataclasses.replace(FACTS, **facts), **changes)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert caught.value.problems[0].fix


@pytest.mark.parametrize("cast", ["bf16_full_eval", "fp16_full_eval"])
def test_weights_in_stages_are_not_to_be_cast(cast: str) -> None:
    """Also where evaluations follow the run."""
    args = arguments(parallelism_config={"pp_size": 2}, **{cast: True})
    with pytest.raises(ConfigError, match=f"{cast}=True: weights that are divided among the stages"):
        resolve(args, FACTS, World(0, 2, 0, 2))


def test_counts_of_one_process_are_refused_on_several() -> None:
    """On one there is no difference, and transformers sets it to False there."""
    args = arguments(average_tokens_across_devices=False)
    assert resolve(args).duration.steps > 0
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False: is not built"):
        resolve(args, FACTS, World(0, 2, 0, 2))


def test_all_problems_are_told_at_once() -> None:
    facts = Facts(None, has_training_data=False, has_evaluation_data=False)
    with pytest.raises(ConfigError) as caught:
        plan_of(facts, eval_strategy="epoch")
    assert {problem.field for problem in caught.value.problems} == {
        "train_dataset",
        "eval_strategy",
        "max_steps",
    }


def test_what_was_assigned_afterwards_is_checked_too() -> None:
    args = arguments()
    args.per_device_train_batch_size = 0
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        resolve(args, FACTS)


@given(
    per_epoch=st.integers(1, 1000),
    epochs=st.floats(0.001, 50),
    max_steps=st.one_of(st.just(-1), st.integers(1, 5000)),
)
def test_the_epochs_have_room_for_the_updates_and_no_more(
    per_epoch: int, epochs: float, max_steps: int
) -> None:
    args = arguments()
    args.num_train_epochs, args.max_steps = epochs, max_steps
    duration = resolve_duration(args, Facts(per_epoch))
    assert duration.steps == (max_steps if max_steps > 0 else math.ceil(epochs * per_epoch))
    assert (duration.epochs - 1) * per_epoch < duration.steps <= duration.epochs * per_epoch


@given(
    done=st.integers(0, 99), before=st.integers(1, 9), per_epoch=st.integers(1, 40), epochs=st.integers(1, 9)
)
def test_updates_of_another_size_make_as_many_passes(
    done: int, before: int, per_epoch: int, epochs: int
) -> None:
    """`done` updates were made, and the data behind them makes `done // before` of today's."""
    args = arguments()
    facts = Facts(per_epoch, resumed=Progress(done, done // before))
    args.num_train_epochs = epochs
    duration = resolve_duration(args, facts)
    left = max(epochs * per_epoch - done // before, 0)
    assert (duration.steps, duration.epochs) == (done + left, epochs)
    args.max_steps = done + 50
    duration = resolve_duration(args, facts)
    assert duration.steps == done + 50
    assert duration.epochs * per_epoch >= done // before + 50, "the epochs end before the updates do"


def test_a_stream_ends_by_its_updates_alone() -> None:
    args = arguments(max_steps=7)
    duration = resolve_duration(args, Facts(None))
    assert (duration.steps, duration.steps_per_epoch) == (7, None)
    assert duration.epochs > 10**6


@pytest.mark.parametrize(("given_steps", "expected"), [(0.25, 10), (0.01, 1), (7, 7), (3.0, 3)])
def test_strides_may_be_parts_of_the_run(given_steps: float, expected: int) -> None:
    plan = plan_of(num_train_epochs=4, logging_steps=given_steps, save_steps=given_steps)
    assert plan.duration.steps == 40
    assert (plan.logging.steps, plan.save.cadence.steps) == (expected, expected)


def test_an_update_is_micro_times_accumulation_times_ranks() -> None:
    args = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    world = World(rank=1, size=2, local_rank=1, local_size=2)
    assert resolve(args, world=world).batch.samples == 24
    batch = resolve_call(args, world).batches
    assert (batch.micro, batch.accumulation, batch.ranks, batch.rank) == (3, 4, 2, 1)


def test_the_plan_takes_each_argument_from_its_place() -> None:
    plan = plan_of(
        seed=5, data_seed=6, learning_rate=0.3, adam_beta2=0.9, warmup_steps=3, lr_scheduler_type="cosine",
        bf16=True, max_grad_norm=0, nonfinite_policy="skip", save_total_limit=2, optim_args="a=1, b = x",
        dataloader_drop_last=True, gradient_checkpointing=True,
    )  # fmt: skip
    optimizer = plan.optimizer
    assert (plan.seed, plan.data.seed, optimizer.learning_rate, optimizer.betas) == (5, 6, 0.3, (0.9, 0.9))
    assert (plan.duration.warmup, plan.schedule.name) == (3, "cosine")
    assert optimizer.options == {"a": "1", "b": "x"}
    assert (plan.precision.compute, plan.stability.max_grad_norm, plan.stability.nonfinite) == (
        "bf16",
        None,
        "skip",
    )
    assert (plan.save.total_limit, plan.data.drop_last, plan.transforms.recompute) == (2, True, True)


def test_updates_in_the_backward_clip_only_if_it_was_requested() -> None:
    """1.0 is the default: one that is given, also later or in a copy, is not one that was left there."""
    assert plan_of(optim="lomo").stability.max_grad_norm is None
    assert plan_of(optim="lomo", max_grad_norm=0).stability.max_grad_norm is None
    assert plan_of(optim="lomo", max_grad_norm=1.0).stability.max_grad_norm == 1.0
    assert plan_of().stability.max_grad_norm == 1.0
    assigned = arguments(optim="lomo")
    assigned.max_grad_norm = 1.0
    for args in (assigned, copy.copy(assigned)):
        assert resolve(args, FACTS).stability.max_grad_norm == 1.0
    with pytest.raises(ConfigError, match="do not compile"):
        plan_of(optim="lomo", max_grad_norm=1.0, torch_compile=True)


def test_a_norm_that_was_given_contradicts_another_one_of_deepspeed() -> None:
    """Also if it is the default: only one that was not given gives way."""
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    assert plan_of(deepspeed=config).stability.max_grad_norm == 0.5
    assert plan_of(deepspeed=config, max_grad_norm=0.5).stability.max_grad_norm == 0.5
    for norm in (1.0, 0.7):
        with pytest.raises(ConfigError, match=f"contradicts max_grad_norm={norm}"):
            plan_of(deepspeed=config, max_grad_norm=norm)


def test_a_memory_budget_is_the_compilers() -> None:
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"memory_budget": 0.5}}
    plan = plan_of(torch_compile_backend="eager", torch_compile_blocks=True, **options)
    assert plan.transforms.compile == CompilePlan("eager", None, blocks=True, memory_budget=0.5)
    assert not plan.transforms.recompute
    assert plan_of(torch_compile_blocks=True).transforms.compile == CompilePlan(blocks=True)
    with pytest.raises(ConfigError, match="set torch_compile=True"):
        plan_of(**options)
    for wrong in ({"memory_budget": 2}, {"memory_budget": "half"}, {"memory_budget": 0.5, "offload": True}):
        with pytest.raises(ConfigError, match="memory_budget"):
            plan_of(torch_compile=True, **options | {"activation_checkpointing_kwargs": wrong})


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """The worlds that a parallel plan was made for, in order."""
    made: list[World] = []

    def counted(settings: Settings, world: World) -> Parallel:
        made.append(world)
        return plan_parallel(settings, world)

    monkeypatch.setattr("windlass.assemble.resolve.plan_parallel", counted)
    return made


def test_a_plan_is_resolved_once(plannings: list[World]) -> None:
    plan_of(bf16=True, bf16_full_eval=True, tf32=None)
    assert plannings == [World()]
    with pytest.raises(ConfigError):
        plan_of(dataclasses.replace(FACTS, has_training_data=False), fsdp_config={"cpu_offload": True})
    assert len(plannings) == 2


def test_the_launcher_may_say_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert plan_of().precision.compute == "bf16"
    plan = plan_of(fp16_full_eval=True, tf32=False)
    assert plan.precision == PrecisionPlan("bf16", tf32=False)
    assert plan.evaluations.cast == "fp16"


def test_the_plan_is_frozen() -> None:
    plan = plan_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]


def test_options_of_the_optimizer_need_values() -> None:
    with pytest.raises(ConfigError, match=r"optim_args=.*'b'"):
        plan_of(optim_args="a=1,b")


def test_schedules_that_follow_a_metric_know_its_direction() -> None:
    changes: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    assert plan_of(**changes, metric_for_best_model="f1").schedule.options["mode"] == "max"
    assert plan_of(**changes, metric_for_best_model="loss").schedule.options["mode"] == "min"


def test_a_search_for_unused_parameters_is_left_to_the_model_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plan_of().dist.find_unused_parameters is None
    for chosen in (True, False):
        assert plan_of(ddp_find_unused_parameters=chosen).dist.find_unused_parameters is chosen


def test_nothing_is_pinned_for_a_run_on_the_cpu() -> None:
    assert resolve(TrainingArguments("out")).data.pin_memory
    assert not plan_of().data.pin_memory
    assert not resolve(TrainingArguments("out", dataloader_pin_memory=False)).data.pin_memory


def test_betas_are_floats_for_torchs_optimizers() -> None:
    args = TrainingArguments("out", adam_beta1=0, adam_beta2=0)
    betas = resolve_call(args, World()).optimizer.betas
    torch.optim.AdamW([torch.zeros(1)], betas=betas)
