"""The optimizers of bitsandbytes, by the names of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.helpers import five_updates_like_the_librarys
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import MissingDependencyError
from windlass.optim.registry import OPTIMIZERS, optimizer_factory

NAMES = [
    "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_32bit",
    "paged_lion_8bit", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "rmsprop_bnb_8bit",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_class_and_arguments_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), optim=name, learning_rate=3e-4, adam_beta2=0.95, use_cpu=True
    )
    cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    ours, our_kwargs = optimizer_factory(OptimizerPlan(name=name, learning_rate=3e-4, betas=(0.9, 0.95)))
    assert issubclass(ours, cls)
    assert our_kwargs == kwargs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_five_updates_equal_the_librarys(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    plan = OptimizerPlan(name=name, learning_rate=1e-2)
    model, ours = five_updates_like_the_librarys(plan)
    stored = ours.state[model.weight]["state1"]
    assert stored.dtype == (torch.uint8 if "8bit" in name else torch.float32)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        MissingDependencyError, match=r"optim='adamw_8bit'.*pip install \"windlass-trainer\[bnb\]\""
    ):
        optimizer_factory(OptimizerPlan(name="adamw_8bit"))


def test_rmsprop_in_32_bits_needs_no_library() -> None:
    assert OPTIMIZERS["rmsprop_bnb"](OptimizerPlan(name="rmsprop_bnb"))[0] is torch.optim.RMSprop
    bnb = pytest.importorskip("bitsandbytes")
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2))
    pair = [(ours, torch.optim.RMSprop([ours], lr=0.1)), (theirs, bnb.optim.RMSprop([theirs], lr=0.1))]
    for parameter, optimizer in pair:
        for step in range(5):
            parameter.grad = parameter.detach() + step
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
