"""The optimizers of torchao, by the names of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.optim.helpers import five_updates_like_the_librarys

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError
from windlass.optim.registry import optimizer_factory

pytest.importorskip("torchao")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """The library compiles its step for each shape, which takes many seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(("name", "size"), [("adamw_torch_8bit", 256), ("adamw_torch_4bit", 128)])
def test_five_updates_equal_the_librarys(name: str, size: int) -> None:
    plan = OptimizerPlan(name=name, learning_rate=1e-2, options={"block_size": str(size)})
    model, ours = five_updates_like_the_librarys(plan)
    assert ours.state[model.weight]["exp_avg"].codes.dtype == torch.uint8
    assert ours.state[model.bias]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_class_and_arguments_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
    cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    ours, our_kwargs = optimizer_factory(OptimizerPlan(name=name))
    assert issubclass(ours, cls)
    assert ours.__name__ == cls.__name__
    assert {**our_kwargs, "bf16_stochastic_round": False} == kwargs


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"takes block_size, bf16_stochastic_round; did you mean 'block_size'"
    ):
        optimizer_factory(OptimizerPlan(name="adamw_torch_8bit", options={"blocksize": "64"}))
