"""The `parallel` section of a recipe becomes arguments of the run."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.cli.print_config import render_config
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_arguments
from windlass.config.plan import ShardPlan
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.recipes.recipe import load_recipe, training_arguments


def test_becomes_arguments() -> None:
    recipe = load_recipe(
        None,
        ["parallel=fsdp", "parallel.fsdp.cpu_offload=true", "parallel.fsdp.layers=[Block]", "parallel.precision=bf16",
         "parallel.accumulation=3", "parallel.ddp.timeout=60", "parallel.cpu=true"],
    )  # fmt: skip
    args = training_arguments(recipe.training, recipe.task)
    assert (args.bf16, args.use_cpu, args.gradient_accumulation_steps, args.ddp_timeout) == (
        True,
        True,
        3,
        60,
    )
    plan = plan_parallel(from_arguments(args), World(0, 2, 0, 2))
    assert plan.dist.timeout_seconds == 60
    assert plan.dist.shard == ShardPlan(
        wrap="transformer", layers=("Block",), cpu_offload=True, param_dtype="bf16", reduce_dtype="fp32"
    )


def test_is_printed() -> None:
    recipe = load_recipe(None, ["parallel=fsdp", "parallel.precision=bf16"])
    assert "strategy: fsdp" in render_config(recipe)


def test_all_that_is_wrong_is_told_with_its_place() -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(
            None,
            ["parallel.launch.processes=3", "parallel.fsdp.cpu_ofload=1", "parallel.precision=bf16",
             "training.bf16=false", "parallel.tp=2"],
        )  # fmt: skip
    problems = {problem.field: problem.fix for problem in error.value.problems}
    assert set(problems) == {
        "parallel.launch.processes", "parallel.fsdp.cpu_ofload", "parallel.precision",
    }  # fmt: skip
    assert "windlass launch" in problems["parallel.launch.processes"]
    assert "contradicts training.bf16=False" in problems["parallel.precision"]


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ([], {"stage": 2}),
        (["parallel.deepspeed.zero_stage=3"], {"stage": 3}),
        (["parallel.deepspeed.config.zero_optimization.stage=1"], {"stage": 1}),
        (["training.deepspeed={zero_optimization: {stage: 3}}"], {"stage": 3}),
        (
            ["parallel.deepspeed.offload_optimizer_device=cpu", "parallel.deepspeed.zero_stage=1"],
            {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        ),
    ],
)
def test_deepspeed_with_a_stage(words: list[str], section: dict[str, Any]) -> None:
    recipe = load_recipe(None, ["parallel.strategy=deepspeed", "parallel.precision=bf16", *words])
    args = training_arguments(recipe.training, recipe.task)
    plan = plan_parallel(from_arguments(args), World(0, 2, 0, 2))
    assert plan.dist.zero is not None
    assert plan.dist.zero.config["zero_optimization"] == section
    assert plan.dist.strategy == "deepspeed"


def test_a_whole_configuration_and_a_field_contradict() -> None:
    words = ["parallel.deepspeed.config.zero_optimization.stage=1", "parallel.deepspeed.zero_stage=3"]
    with pytest.raises(
        ConfigError, match=r"parallel.deepspeed.zero_stage.*contradicts parallel.deepspeed.config"
    ):
        load_recipe(None, ["parallel.strategy=deepspeed", *words])


@pytest.mark.parametrize(
    ("strategy", "words", "message"),
    [
        (
            "deepspeed",
            ["training.deepspeed={zero_optimization: {stage: 3}}", "parallel.deepspeed.zero_stage=1"],
            "contradicts training.deepspeed.zero_optimization.stage=3",
        ),
        (
            "fsdp",
            ["training.fsdp_config.offload_params=false", "parallel.fsdp.cpu_offload=true"],
            "contradicts training.fsdp_config.offload_params=False",
        ),
        (
            "fsdp",
            ["training.fsdp_config=f.json", "parallel.fsdp.cpu_offload=true"],
            "belongs into f.json, which training.fsdp_config names",
        ),
    ],
)
def test_a_section_of_training_and_a_setting_contradict(
    strategy: str, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, [f"parallel.strategy={strategy}", *words])
