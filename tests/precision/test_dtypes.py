"""What a run states about its dtypes, against the tensors of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.config.plan import DistPlan, PrecisionPlan, ShardPlan
from windlass.precision.check import autocast_context
from windlass.precision.dtypes import Dtypes, dtypes_of, weights_of


@pytest.mark.parametrize(
    ("precision", "dist", "weights", "stated"),
    [
        ("fp32", DistPlan(), "float32", Dtypes("float32", "float32", "float32")),
        ("bf16", DistPlan(), "float32", Dtypes("float32", "bfloat16", "float32")),
        ("fp32", DistPlan(), "bfloat16", Dtypes("bfloat16", "bfloat16", "bfloat16")),
        ("bf16", DistPlan(comm_hook="fp16"), "float32", Dtypes("float32", "bfloat16", "float16")),
        (
            "fp32", DistPlan(comm_hook="power_sgd", comm_wrapper="bf16"), "float32",
            Dtypes("float32", "float32", "bfloat16"),
        ),
        ("fp32", DistPlan(strategy="fsdp", shard=ShardPlan()), "float32", Dtypes("float32", "float32", "float32")),
        (
            "bf16", DistPlan(strategy="fsdp", shard=ShardPlan(param_dtype="bf16", reduce_dtype="fp32")), "float32",
            Dtypes("float32", "bfloat16", "float32"),
        ),
        (
            "fp32", DistPlan(strategy="fsdp", shard=ShardPlan(param_dtype="bf16")), "float32",
            Dtypes("float32", "bfloat16", "bfloat16"),
        ),
    ],
)  # fmt: skip
def test_the_plan_states_three_dtypes(precision: str, dist: DistPlan, weights: str, stated: Dtypes) -> None:
    assert dtypes_of(PrecisionPlan(precision), dist, weights) == stated  # type: ignore[arg-type]


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_step_has_the_dtypes_that_are_stated(compute: str) -> None:
    model, plan = nn.Linear(3, 2), PrecisionPlan(compute)  # type: ignore[arg-type]
    stated = dtypes_of(plan, DistPlan(), weights_of(model))
    with autocast_context(plan, torch.device("cpu"))():
        out = model(torch.ones(4, 3))
    out.float().sum().backward()
    found = [model.weight, out, model.weight.grad]
    assert [str(t.dtype) for t in found if t is not None] == [
        f"torch.{name}" for name in (stated.weights, stated.compute, stated.reduction)
    ]


def test_weights_of_several_dtypes_are_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False).bfloat16(), nn.Linear(2, 2).half())
    model[2].requires_grad_(False)
    assert weights_of(model) == "float32 (2 parameters) and bfloat16 (1 parameters)"
    assert weights_of(model.requires_grad_(False)) == "none"
