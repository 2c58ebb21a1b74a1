"""torch.compile in place: names stay, values stay, and what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.versions import needs
from torch import nn

from windlass.config.plan import CompilePlan
from windlass.core.errors import ConfigError
from windlass.transforms.compile import CompileCounts, apply_compile


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_the_module_stays_itself_and_computes_the_same() -> None:
    plain, compiled = model(), model()
    assert apply_compile(compiled, CompilePlan("aot_eager")) is compiled
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
    counts, compiled = CompileCounts(), apply_compile(make(), CompilePlan("eager"))
    with counts.counting():
        compiled(torch.randn(5, 3))
    assert counts.graphs == 1


class Deep(nn.Module):
    """Three blocks of one class, whose activations the backward needs."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 32), nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs)
        for _ in range(3):
            hidden = torch.tanh(hidden)
        return self.down(hidden)


class Layer(nn.TransformerEncoderLayer):
    """A class of torch's, whose frames the compiler skips."""

    def __init__(self) -> None:
        super().__init__(3, 1, 8, 0.0, batch_first=True)


Layer.__module__ = "torch.nn.modules.transformer"


@pytest.mark.parametrize(
    "kind",
    [
        Block,
        pytest.param(Layer, marks=needs("torch", "2.11", "2.9 compiles each block of torch's own classes")),
    ],
)
def test_repeated_blocks_share_one_graph(kind: type[nn.Module]) -> None:
    plain, compiled, counts = Deep(kind), Deep(kind), CompileCounts()
    apply_compile(compiled, CompilePlan("aot_eager", blocks=True))
    inputs = torch.randn(5, 4, 3, requires_grad=True)  # as those of later blocks do
    with counts.counting():
        for each in (plain, compiled):
            each(inputs).sum().backward()
    assert (counts.graphs, counts.recompilations) == (1, 0)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_another_shape_is_a_recompilation_once() -> None:
    compiled, counts = apply_compile(Deep(Block), CompilePlan("eager")), CompileCounts()
    with counts.counting():
        for rows in (2, 3, 4, 5):
            compiled(torch.randn(rows, 3))
    assert (counts.graphs, counts.recompilations) == (2, 1)
    compiled(torch.randn(2, 3).double().float())
    assert counts.graphs == 2


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_compile_blocks=True: Wrapped has no repeated blocks"):
        apply_compile(Wrapped(), CompilePlan(blocks=True))


def kept(budget: float | None) -> tuple[int, list[torch.Tensor]]:
    """Numbers that a compiled forward saves for the backward, and the gradients."""
    torch._dynamo.reset()
    compiled, sizes = apply_compile(Deep(Block), CompilePlan("aot_eager", memory_budget=budget)), []
    parameters = {p.data_ptr() for p in compiled.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if tensor.data_ptr() in parameters else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = compiled(torch.arange(48.0).reshape(16, 3) / 48).sum()
    loss.backward()
    return sum(sizes), [p.grad for p in compiled.parameters() if p.grad is not None]


def test_a_memory_budget_keeps_fewer_activations_and_the_gradients() -> None:
    (most, expected), (same, _), (least, found) = kept(None), kept(1.0), kept(0.0)
    assert same == most
    assert least < most / 2
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("backend", "mode", "message"),
    [
        ("inductr", None, "torch_compile_backend='inductr': did you mean 'inductor'"),
        ("eager", "max-autotune", "modes belong to the inductor backend"),
    ],
)
def test_what_cannot_be_is_refused(backend: str, mode: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_compile(model(), CompilePlan(backend, mode))
    assert message in str(caught.value)


class Breaking(nn.Module):
    """Its forward takes two graphs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        doubled = inputs * 2
        torch._dynamo.graph_break()
        return doubled + 1


def test_a_full_graph_has_no_breaks() -> None:
    inputs = torch.ones(3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        apply_compile(Breaking(), CompilePlan("eager", fullgraph=True))(inputs)
    torch._dynamo.reset()  # graphs belong to the code of a forward, no matter which test compiled it
    assert torch.equal(apply_compile(Breaking(), CompilePlan("eager"))(inputs), inputs * 2 + 1)


def test_a_dynamic_graph_is_for_any_size() -> None:
    compiled, counts = apply_compile(Deep(Block), CompilePlan("eager", dynamic=True)), CompileCounts()
    with counts.counting():
        for rows in (2, 3, 4, 5):
            compiled(torch.randn(rows, 3))
    assert (counts.graphs, counts.recompilations) == (1, 0)


def test_options_reach_the_backend() -> None:
    seen = []

    @torch._dynamo.register_backend(name="windlass_noting")
    def noting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, options: dict[str, int]) -> Any:
        seen.append(options)
        return graph.forward

    apply_compile(model(), CompilePlan("windlass_noting", options={"level": 3}))(torch.randn(2, 3))
    assert seen == [{"level": 3}]


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        (
            {"max_autotun": True},
            None,
            "compile.options.max_autotun=True: inductor has no such option; did you mean",
        ),
        ({"max_autotune": "yes"}, None, "Unexpected type of attr max_autotune, got str should be bool"),
        (
            {"max_autotune": True},
            "max-autotune",
            "torch takes a mode or options, and the mode is 'max-autotune'",
        ),
    ],
)
def test_options_of_inductor_are_checked(options: dict[str, Any], mode: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_compile(model(), CompilePlan(mode=mode, options=options))
    assert message in str(caught.value)
