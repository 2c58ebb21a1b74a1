"""What a device or a model cannot compute in is refused before the first step."""

from __future__ import annotations

import pytest
import torch
from tests.optim.helpers import heard

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import ConfigError
from windlass.precision.check import apply_tf32, check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_cpu_takes_all_three(compute: str) -> None:
    check_precision(PrecisionPlan(compute=compute), CPU, torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_tf32_needs_a_device_that_has_it() -> None:
    with pytest.raises(ConfigError, match="tf32=True: cpu has no TF32"):
        check_precision(PrecisionPlan(tf32=True), CPU)
    check_precision(PrecisionPlan(tf32=False), CPU)


def test_fp16_with_fp16_weights_is_refused_and_named() -> None:
    model = torch.nn.Linear(2, 2).half()
    with pytest.raises(ConfigError, match=r"2 trainable parameters are already float16 \(weight"):
        check_precision(PrecisionPlan(compute="fp16"), CPU, model)
    check_precision(PrecisionPlan(compute="fp16"), CPU, model.requires_grad_(False))


def test_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_precision(PrecisionPlan(compute="fp16", tf32=True), CPU, torch.nn.Linear(2, 2).half())
    assert len(caught.value.problems) == 2


def test_a_model_loaded_in_bf16_is_warned_of() -> None:
    with heard() as records:
        check_precision(PrecisionPlan(compute="bf16"), CPU, torch.nn.Linear(2, 2))
        check_precision(PrecisionPlan(compute="bf16"), CPU, torch.nn.Linear(2, 2).bfloat16())
    assert len(records) == 1
    assert (
        "2 trainable parameters are bfloat16: an update smaller than about 0.0039" in records[0].getMessage()
    )
    weight = torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(weight + 0.0038, weight)
    assert not torch.equal(weight + 0.0040, weight)


def test_tf32_is_set_only_when_asked() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        apply_tf32(PrecisionPlan())
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
        apply_tf32(PrecisionPlan(tf32=not before[0]))
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
