"""torch.compile in place: names stay, values stay, and what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from windlass.core.errors import ConfigError
from windlass.transforms.compile import apply_compile


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_the_module_stays_itself_and_computes_the_same() -> None:
    plain, compiled = model(), model()
    assert apply_compile(compiled, backend="aot_eager") is compiled
    inputs = torch.randn(5, 3)
    for each in (plain, compiled):
        each(inputs).sum().backward()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * 2


@pytest.mark.parametrize("make", [model, Wrapped])
def test_calls_really_go_through_the_backend(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = apply_compile(make(), backend="eager")
    compiled(torch.randn(5, 3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "mode", "message"),
    [
        ("inductr", None, "torch_compile_backend='inductr': did you mean 'inductor'"),
        (None, "fastest", "torch_compile_mode='fastest': known modes: default"),
        ("eager", "max-autotune", "modes belong to the inductor backend"),
    ],
)
def test_what_cannot_be_is_refused(backend: str | None, mode: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_compile(model(), backend, mode)
    assert message in str(caught.value)
