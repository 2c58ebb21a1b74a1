"""Layouts that are tried for given devices: what is written is read, and what is proposed is not refused by the run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.forecast import proposed_runs
from tests.forecast.models import trainer
from tests.forecast.proposed_runs import train

from windlass.core.errors import ConfigError, WindlassError
from windlass.core.mesh import Mesh
from windlass.dist.imagined import MACHINE
from windlass.forecast.child import apart
from windlass.forecast.forecast import Forecast
from windlass.forecast.layouts import Devices, Layout, cost_of, exchanged, layouts
from windlass.forecast.size import Size
from windlass.forecast.tracing import size_of, trace_of
from windlass.metrics.device_peaks import BOARDS


def test_devices_as_they_are_written() -> None:
    assert Devices.read("8x80GB") == (8, 80 * 10**9)
    assert Devices.read("8x80GB").room < 80 * 10**9
    for text in ("8", "80GB", "0x80GB", "8x80", "-1x80GB", "1000000000x80GB", "9" * 5000 + "x80GB"):
        with pytest.raises(ConfigError, match="such as 8x80GB"):
            Devices.read(text)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 1024])
def test_layouts_are_products_of_axes(devices: int) -> None:
    found = list(layouts(devices, 8))
    assert len({each.name for each in found}) == len(found) < 5000
    for layout in found:
        assert layout.mesh.size() == devices
        assert math.prod(map(layout.mesh.along, ("expert", "context", "sequence", "tensor"))) <= MACHINE
    names = {layout.name for layout in found}
    if devices == 8:
        assert {"replicas 8", "pipeline 2 x shards 2 x tensor 2, recomputed", "shards 4 x experts 2"} <= names
    assert not any(each.mesh.pipeline > 1 for each in layouts(devices, 1))
    if devices == 6:
        assert {"replicas 2 x shards 3", "pipeline 3 x tensor 2"} <= names


@pytest.mark.parametrize(
    ("recipe", "layout", "overrides"),
    [
        ({}, Layout(Mesh(replicate=8)), ()),
        ({}, Layout(Mesh(shard=4, tensor=2), sharded=True), ("parallel.strategy=fsdp", "parallel.tp=2")),
        (
            {"parallel": {"strategy": "fsdp", "mesh": {"tp": 8}}},
            Layout(Mesh(2, 2, pipeline=2), sharded=True),
            ("parallel.dp_replicate=2", "parallel.mesh.tp=null", "parallel.pp=2"),
        ),
        (
            {"parallel": {"strategy": "fsdp", "dp_shard": 8}, "training": {"gradient_checkpointing": True}},
            Layout(Mesh(replicate=8)),
            ("parallel.dp_shard=null", "parallel.strategy=null", "training.gradient_checkpointing=false"),
        ),
        ({"training": {"fsdp": True}}, Layout(Mesh(replicate=8)), ("training.fsdp=null",)),
        ({"training": {"fsdp": "full_shard"}}, Layout(Mesh(shard=8), sharded=True), ()),
        (
            {"training": {"parallelism_config": {"tp_size": 2}}},
            Layout(Mesh(replicate=4, tensor=2)),
            ("parallel.tp=2", "training.parallelism_config=null"),
        ),
    ],
)
def test_overrides_set_what_a_recipe_sets_otherwise(
    recipe: dict[str, Any], layout: Layout, overrides: tuple[str, ...]
) -> None:
    assert layout.overrides(recipe) == overrides


SIZE = Size(8 * 10**9, 16 * 10**9, 16 * 10**9, 32, 8192, 4, 2, 64 * 10**9)
H100 = BOARDS["NVIDIA H100 80GB HBM3"]


def cost(size: Size = SIZE, **axes: Any) -> float:
    more = {name: axes.pop(name) for name in ("sharded", "recomputed") if name in axes}
    return cost_of(Layout(Mesh(**axes), **more), size, H100).seconds


def test_what_exchanges_or_computes_more_costs_more() -> None:
    assert cost(replicate=8) <= cost(shard=8, sharded=True) < cost(shard=4, tensor=2, sharded=True)
    assert cost(replicate=8, recomputed=True) == pytest.approx(4 / 3 * cost(replicate=8), rel=0.01)
    assert cost(shard=8, sharded=True) < cost(shard=16, sharded=True), "the network of machines is slower"
    waits = [cost(SIZE._replace(micro_batches=count), replicate=4, pipeline=2) for count in (1, 2, 8)]
    assert waits == sorted(waits, reverse=True)


def test_what_an_update_holds_is_known_before_it_is_laid_out(tmp_path: Path) -> None:
    def start() -> None:
        trainer(tmp_path, layers=9, lean_loss=False).train()

    found = trace_of(start)
    kinds = ("weights", "gradients", "optimizer state")
    most = (found.at_most(lambda owner, kind=kind: owner.kind == kind) for kind in kinds)  # type: ignore[misc]
    assert size_of(start).held == sum(most)


def test_what_a_rank_sends_by_estimate_is_what_a_trace_counts(tmp_path: Path) -> None:
    """Of replicas and of shards, of which the root is gathered once: see `test_tracing.py`."""
    size = size_of(lambda: trainer(tmp_path, layers=4, lean_loss=False).train())
    cases: list[tuple[Layout, dict[str, Any]]] = [
        (Layout(Mesh(replicate=4)), {}),
        (Layout(Mesh(shard=4), sharded=True), {"fsdp": True}),
    ]
    for layout, given in cases:
        found = trace_of(lambda given=given: trainer(tmp_path, layers=4, lean_loss=False, **given).train(), 4)  # type: ignore[misc]
        counted = sum(link.nbytes for link in Forecast(found).links())
        assert sum(nbytes for nbytes, _ in exchanged(layout, size).values()) == pytest.approx(
            counted, rel=0.2
        )


RECIPE = """\
task: causal-lm
data: {{format: python-docs, block_size: 32, max_samples: 60}}
model: {{config: {config}}}
tokenizer: {{train: {{vocab_size: 300}}}}
training: {{max_steps: 1, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, use_cpu: true}}
"""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "lora": {"model_type": "llama", **SIZES},
    "five-layers": {"model_type": "llama", **SIZES, "num_hidden_layers": 5},
    "tied": {"model_type": "qwen3", **SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 36, "n_layer": 3, "n_head": 6, "attn_pdrop": 0.0},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {
        "model_type": "lfm2",
        **SIZES,
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
}


def check_proposals(folder: Path, model: str, world: int, chosen: Sequence[Layout]) -> None:
    """Each layout is planned, and run on real ranks: what is planned makes its update, and what is refused is refused
    by the run in the same words.
    """
    recipe = folder / "recipe.yaml"
    adapter = "adapter: {r: 2, target_modules: all-linear}\n" if model == "lora" else ""
    recipe.write_text(adapter + RECIPE.format(config=json.dumps(CONFIGS[model])))
    cases = {str(number): list(layout.overrides({})) for number, layout in enumerate(chosen)}
    planned = {name: said_by_plan(recipe, overrides, world) for name, overrides in cases.items()}
    for rank, ran in enumerate(on_ranks(world, proposed_runs.main, recipe, folder, cases)):
        for name, overrides in cases.items():
            assert planned[name] == ran[name], (overrides, rank)


def said_by_plan(recipe: Path, overrides: list[str], world: int) -> str:
    """The refusal; empty if there is none."""

    def said() -> str:
        try:
            trace_of(lambda: train(str(recipe), overrides), world)
        except WindlassError as error:
            return str(error)
        return ""

    return str(apart(said))


@pytest.mark.dist
def test_a_layout_that_is_proposed_is_not_refused_by_the_run(tmp_path: Path) -> None:
    """Experts are refused, for there are none."""
    check_proposals(tmp_path, "llama", 2, [Layout(Mesh(expert=2)), Layout(Mesh(pipeline=2))])


@pytest.mark.slow
@pytest.mark.dist
def test_a_product_of_axes_that_is_proposed_is_not_refused_by_the_run(tmp_path: Path) -> None:
    """Five layers on two stages, whose parameters are sharded."""
    check_proposals(tmp_path, "five-layers", 4, [Layout(Mesh(shard=2, pipeline=2), sharded=True)])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_layouts_of_several_models_that_are_proposed_are_not_refused(
    tmp_path: Path, model: str, world: int
) -> None:
    """At most ten, others for each model: over all models each axis meets each other one."""
    every = list(layouts(world, 2))
    check_proposals(tmp_path, model, world, random.Random(model).sample(every, min(10, len(every))))
