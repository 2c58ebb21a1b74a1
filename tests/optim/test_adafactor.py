"""Adafactor against transformers', step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.optim.optimizers.adafactor import Adafactor

OPTIONS = st.one_of(
    st.fixed_dictionaries(
        {"lr": st.just(0.01), "relative_step": st.just(False), "scale_parameter": st.booleans()}
    ),
    st.fixed_dictionaries(
        {"relative_step": st.just(True), "scale_parameter": st.booleans(), "warmup_init": st.booleans()}
    ),
)
COMMON = st.fixed_dictionaries(
    {
        "beta1": st.sampled_from([None, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "clip_threshold": st.floats(0.1, 2),
    }
)


@given(options=OPTIONS, common=COMMON, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=25)
def test_equals_transformers(options: dict[str, Any], common: dict[str, Any], dtype: torch.dtype) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    torch.manual_seed(0)
    starts = [torch.randn(shape).to(dtype) for shape in ((3, 4), (5,), (2, 3, 4), ())]
    ours_on, theirs_on = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    ours = Adafactor(ours_on, **options, **common)
    theirs = optimization.Adafactor(theirs_on, **options, **common)
    for _ in range(3):
        for a, b in zip(ours_on, theirs_on, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
        for a, b in zip(ours_on, theirs_on, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6 if dtype != torch.bfloat16 else 8e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.1}, "set relative_step=False, or lr=None"),
        ({"relative_step": False}, "needs a learning rate"),
        ({"lr": 0.1, "relative_step": False, "warmup_init": True}, "set both or none"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adafactor([torch.nn.Parameter(torch.zeros(2))], **options)


def test_the_closure_is_called_with_gradients_on() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adafactor([parameter], lr=0.1, relative_step=False, scale_parameter=False)

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert parameter[0] < 1
