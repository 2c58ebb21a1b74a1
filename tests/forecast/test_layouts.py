"""Layouts that are tried for given devices: what is written is read, and what is proposed is not refused by the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.forecast.models import llama, trainer
from tests.forecast.proposed_runs import train

from windlass import ParallelismConfig
from windlass.core.errors import ConfigError, WindlassError
from windlass.forecast.child import apart
from windlass.forecast.layouts import Devices, layouts
from windlass.forecast.tracing import trace_of


def test_devices_as_they_are_written() -> None:
    assert Devices.read("8x80GB") == (8, 80 * 10**9)
    assert Devices.read("8x80GB").room < 80 * 10**9
    for text in ("8", "80GB", "0x80GB", "8x80", "-1x80GB"):
        with pytest.raises(ConfigError, match="such as 8x80GB"):
            Devices.read(text)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 1024])
def test_sizes_of_axes_fit_the_number_of_devices(devices: int) -> None:
    found = list(layouts(devices))
    assert found[0].overrides == ()
    assert len({each.name for each in found}) == len(found)
    for layout in found:
        for word in layout.overrides:
            if word.startswith("parallel.mesh."):
                assert devices % int(word.partition("=")[2]) == 0


ARGUMENTS: dict[str, dict[str, Any]] = {
    "parallel.strategy=fsdp": {"fsdp": True},
    "training.activation_checkpointing=true": {"activation_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 6, 8])
def test_what_is_traced_was_checked_as_the_run_is(tmp_path: Path, devices: int) -> None:
    """Every layout is planned, or refused in the words of the run: heads that an axis does not divide, for example."""
    refused = []
    for layout in layouts(devices):
        arguments: dict[str, Any] = {}
        for word in layout.overrides:
            name, _, size = word.partition("=")
            if name.startswith("parallel.mesh."):
                arguments["parallelism_config"] = ParallelismConfig(**{f"{name[-2:]}_size": int(size)})
            else:
                arguments |= ARGUMENTS[word]
        try:
            trace_of(lambda given=arguments: trainer(tmp_path, llama(2), **given).train(), devices)  # type: ignore[misc]
        except ConfigError as error:
            refused.append(f"{layout.name}: {error}")
    assert all("_size" in line for line in refused), refused
    assert len(refused) < len(list(layouts(devices)))


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


def check_proposals(folder: Path, model: str, world: int, named: tuple[str, ...] = ("",)) -> None:
    """Each layout whose name has one of `named` is planned, and run on real ranks: what is planned makes its update,
    and what is refused is refused by the run in the same words.
    """
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(config=json.dumps(CONFIGS[model])))
    cases = {
        str(number): list(layout.overrides)
        for number, layout in enumerate(layouts(world))
        if any(each in layout.name for each in named)
    }
    assert len(cases) >= len(named)
    planned = {name: said_by_plan(recipe, overrides, world) for name, overrides in cases.items()}
    launch(world, Path(__file__).with_name("proposed_runs.py"), recipe, folder, json.dumps(cases))
    for rank in range(world):
        ran = json.loads((folder / f"rank{rank}.json").read_text())
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
    check_proposals(tmp_path, "llama", 2, ("experts", "pipeline"))  # of which the first is refused


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_layouts_of_several_models_that_are_proposed_are_not_refused(
    tmp_path: Path, model: str, world: int
) -> None:
    check_proposals(tmp_path, model, world)
