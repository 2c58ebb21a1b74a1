"""What a device or a model cannot compute in is refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import ConfigError
from windlass.precision.check import apply_tf32, check_precision, check_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_cpu_takes_all_three(compute: str) -> None:
    check_precision(PrecisionPlan(compute=compute), CPU, torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_tf32_needs_a_device_that_has_it() -> None:
    with pytest.raises(ConfigError, match="tf32=True: cpu has no TF32"):
        check_precision(PrecisionPlan(tf32=True), CPU)
    check_precision(PrecisionPlan(tf32=False), CPU)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_weights_in_fp16_are_refused_and_named(compute: Any) -> None:
    model = torch.nn.Linear(2, 2).half()
    with pytest.raises(ConfigError, match=r"2 trained parameters are float16 \(weight"):
        check_precision(PrecisionPlan(compute), CPU, model)
    with pytest.raises(ConfigError, match=r"parameter 0 of the optimizer"):
        check_weights(torch.optim.SGD(model.parameters()))
    check_precision(PrecisionPlan(compute), CPU, model.requires_grad_(False))


def test_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_precision(PrecisionPlan(compute="fp16", tf32=True), CPU, torch.nn.Linear(2, 2).half())
    assert len(caught.value.problems) == 2


def test_tf32_is_set_only_when_asked() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        apply_tf32(PrecisionPlan())
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
        apply_tf32(PrecisionPlan(tf32=not before[0]))
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("dtype", "attention"), [("float64", "eager"), ("float64", "sdpa"), ("float32", "eager")]
)
def test_attention_that_becomes_nan_is_warned_of(
    dtype: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding more than a window away from the last token of its row sees nothing."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=2,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).to(getattr(torch, dtype))
    model.set_attn_implementation(attention)
    check_precision(PrecisionPlan(), CPU, model)
    with torch.no_grad():
        logits = model(torch.ones(1, 8, dtype=torch.int64), torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]])).logits
    assert ("window of 2 tokens" in caplog.text) == bool(logits.isnan().any())
