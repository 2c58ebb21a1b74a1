"""The choice among several configurations of DeepSpeed, which an accelerator keeps."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from windlass import Accelerator
from windlass.accelerator.setup import EngineChoice
from windlass.config.plan import ZeroPlan
from windlass.core.errors import ConfigError
from windlass.state import AcceleratorState
from windlass.utils import DeepSpeedPlugin, DummyOptim

CONFIGS = {"student": {"zero_optimization": {"stage": 2}}, "teacher": {"zero_optimization": {"stage": 3}}}


def test_the_first_is_selected_until_another_is() -> None:
    made: list[Any] = []
    choice = EngineChoice(lambda: {name: ZeroPlan(config) for name, config in CONFIGS.items()}, "bf16")
    choice.divide_new_models(made.append)
    assert choice.plan is not None
    assert choice.plan.config is CONFIGS["student"]
    choice.select("teacher")
    assert choice.plugin is not None
    assert choice.plugin.zero_stage == 3
    assert choice.plugin.deepspeed_config["bf16"] == {"enabled": True}
    assert [plan.config for plan in made] == list(CONFIGS.values()), (
        "models are built as the selected one says"
    )
    copied = pickle.loads(pickle.dumps(choice))  # of a data worker
    assert copied.plan == choice.plan
    with pytest.raises(ConfigError, match="'student', 'teacher'"):
        choice.select("third")


def test_a_placeholder_becomes_the_optimizer_of_the_configuration() -> None:
    options = {"lr": 0.2, "weight_decay": "auto", "adam_w_mode": True, "torch_adam": True}
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": options}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    parameters = list(nn.Linear(2, 1).parameters())
    made = accelerator.prepare(DummyOptim(parameters, lr=0.1, weight_decay=0.3, betas=(0.5, 0.6)))
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.3, (0.5, 0.6))
    assert accelerator.prepare(made) is made
    with pytest.raises(ConfigError, match=r"optimizer.type='AdamW': contradicts SGD of the script"):
        accelerator.prepare(torch.optim.SGD(parameters))


def test_an_accelerator_shows_its_plugins() -> None:
    plugins = {"a": DeepSpeedPlugin(zero_stage=1, gradient_clipping=0.5), "b": DeepSpeedPlugin(zero_stage=2)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    state = accelerator.state
    assert list(state.deepspeed_plugins or {}) == ["a", "b"]
    assert (state.deepspeed_plugin.zero_stage, state.deepspeed_plugin.gradient_clipping) == (1, 0.5)  # type: ignore[union-attr]
    AcceleratorState().select_deepspeed_plugin("b")
    assert accelerator.deepspeed_plugin.zero_stage == AcceleratorState().deepspeed_plugin.zero_stage == 2
    assert accelerator.state.get_deepspeed_plugin("a").zero_stage == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deepspeed_plugins": {"a": object()}}, "must be a dict of names and DeepSpeedPlugin objects"),
        ({"deepspeed_plugins": {}}, "must be a dict of names"),
        ({"deepspeed_plugin": 2}, "or one such object"),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": {"a": DeepSpeedPlugin()}},
            "one of the two",
        ),
    ],
)
def test_what_is_not_a_plugin_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, **given)


def test_a_configuration_that_enables_a_precision_sets_it() -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert (
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)).mixed_precision == "bf16"
    )
    model = nn.Linear(1, 1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="no", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    with pytest.raises(ConfigError, match="contradicts mixed_precision=False"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_the_state_of_the_process_does_not_keep_the_models_of_an_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(nn.Linear(2, 2))
    model = weakref.ref(prepared)
    del accelerator, prepared
    gc.collect()
    assert AcceleratorState().deepspeed_plugin is None
    assert model() is None


def test_the_plugins_stay_in_the_state_of_the_process() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    del accelerator
    gc.collect()
    assert AcceleratorState().deepspeed_plugin.zero_stage == 2  # type: ignore[union-attr]
