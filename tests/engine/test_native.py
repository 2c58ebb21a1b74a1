"""The native executor: the same bits as torch's own calls, in the order that a step promises."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from windlass.core.events import EVENTS
from windlass.core.run_clock import BACKWARD, COMPUTE, run_clock
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks
from windlass.engine.native import NativeExecutor
from windlass.precision.scaler import LossScaler
from windlass.transforms.alone import Alone

CPU = torch.device("cpu")


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def executor_of(module: nn.Module, **options: Any) -> NativeExecutor:
    return NativeExecutor(Alone(module), torch.optim.SGD(module.parameters(), lr=0.1), CPU, **options)


@pytest.mark.parametrize(("processes", "kind"), [(1, COMPUTE), (2, BACKWARD)])
def test_time_in_which_others_may_be_waited_for_is_apart(
    processes: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whatever axis the others are: those that divide layers are waited for in each backward."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    module, seen = model(), []
    executor = executor_of(module)
    run_clock().enter(COMPUTE)
    module.weight.register_hook(lambda gradient: seen.append(run_clock().kind))
    executor.backward(module(torch.ones(2, 4)).sum())
    assert (seen, run_clock().kind) == ([kind], COMPUTE)


class Hooks(StepHooks):
    """Squared outputs; writes down the order of events."""

    def __init__(self, executor: NativeExecutor, factor: float = 1.0, weight: float | None = None) -> None:
        self.executor, self.factor, self.weight = executor, factor, weight
        self.trace: list[str] = []
        self.heard = EVENTS

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        self.trace.append(f"micro {index}")
        loss = self.executor.model(update.batches[index]).square().mean() * self.factor
        self.executor.backward(loss)
        return loss.detach()

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        return None if self.weight is None else torch.tensor(self.weight), {"part": torch.tensor(2.0)}

    def event(self, name: str) -> None:
        self.trace.append({"on_substep_end": "substep", "on_pre_optimizer_step": "before"}[name])

    def stepped(self, applied: bool) -> None:
        assert any(p.grad is not None for p in self.executor.model.parameters()), (
            "gradients are there to be seen"
        )
        self.trace.append("applied" if applied else "skipped")


def group(count: int, denominator: float = 1.0) -> UpdateBatch:
    torch.manual_seed(1)
    batches = [torch.randn(5, 4) for _ in range(count)]
    return UpdateBatch(batches, [[]] * count, count, 0, False, denominator=denominator)


@pytest.mark.parametrize("max_norm", [None, 0.01, 100.0])
@pytest.mark.parametrize("weight", [None, 0.5])
def test_an_update_has_the_bits_of_torchs_calls(max_norm: float | None, weight: float | None) -> None:
    ours, theirs = model(), model()
    executor, optimizer = executor_of(ours), torch.optim.SGD(theirs.parameters(), lr=0.1)
    result = executor.run_step(group(3), Hooks(executor, weight=weight), max_norm=max_norm)
    for batch in group(3).batches:
        theirs(batch).square().mean().backward()
    for parameter in theirs.parameters():
        parameter.grad = parameter.grad * weight if weight and parameter.grad is not None else parameter.grad
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    optimizer.step()
    assert torch.equal(result.norm, norm), "the norm before clipping"
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert result.applied
    assert result.parts == {"part": torch.tensor(2.0)}
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_events_come_in_their_order() -> None:
    executor = executor_of(model())
    hooks = Hooks(executor)
    executor.run_step(group(3), hooks)
    assert hooks.trace == [
        "micro 0",
        "substep",
        "micro 1",
        "substep",
        "micro 2",
        "before",
        "applied",
    ]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_guarded_update_that_is_not_finite_is_left_out(factor: float) -> None:
    module = model()
    before = [p.clone() for p in module.parameters()]
    executor = executor_of(module)
    result = executor.run_step(group(2), Hooks(executor, factor), max_norm=1.0, guard=True)
    assert not result.applied
    assert not math.isfinite(float(result.norm))
    assert all(map(torch.equal, module.parameters(), before))
    assert executor.run_step(group(2), Hooks(executor), max_norm=1.0, guard=True).applied, (
        "the next one is made"
    )


def test_an_overflow_under_the_scaler_is_left_out_and_halves_the_scale() -> None:
    module = model()
    before = [p.clone() for p in module.parameters()]
    scaler = LossScaler(CPU, init_scale=2.0)
    executor = executor_of(module, scaler=scaler)
    assert not executor.run_step(group(1), Hooks(executor, math.inf)).applied
    assert (scaler.skipped, scaler.get_scale()) == (1, 1.0)
    assert all(map(torch.equal, module.parameters(), before))
    state = executor.state_dict()
    other = executor_of(model(), scaler=LossScaler(CPU))
    other.load_state_dict(state)
    assert other.state_dict() == state


@given(scale=st.integers(-10, 10))
def test_the_scale_is_undone_before_the_norm(scale: int) -> None:
    plain, scaled = executor_of(model()), executor_of(model(), scaler=LossScaler(CPU, init_scale=2.0**scale))
    results = [each.run_step(group(2), Hooks(each), max_norm=0.1) for each in (plain, scaled)]
    assert torch.equal(results[0].norm, results[1].norm), "powers of two are exact"
    assert all(map(torch.equal, plain.model.parameters(), scaled.model.parameters()))


def test_frozen_parameters_and_those_of_the_optimizer_alone() -> None:
    module, extra = model(), nn.Parameter(torch.ones(2))
    module.bias.requires_grad_(False)
    executor = NativeExecutor(Alone(module), torch.optim.SGD([module.weight, extra], lr=0.1), CPU)
    executor.backward(module(torch.ones(1, 4)).sum() + extra.sum() * 3)
    expected = torch.linalg.vector_norm(torch.cat([torch.ones(12), torch.full((2,), 3.0)]))
    assert torch.isclose(executor.clip(None), expected)
    assert executor.step()
    executor.zero_grad()
    assert extra.grad is None
    assert extra[0].item() == pytest.approx(0.7)


def test_a_correction_of_bf16_gradients_is_rounded_once() -> None:
    """Rounded to bf16 on its own, 1.0021 would be 1.0; the product with 1.9921875 is nearer to the next number."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    module.weight.grad = torch.tensor([[1.9921875]], dtype=torch.bfloat16)
    factor = torch.tensor(1.0021, dtype=torch.float64)
    executor_of(module).clip(None, factor)
    expected = (torch.tensor(1.9921875, dtype=torch.float64) * factor.float().double()).bfloat16()
    assert module.weight.grad is not None
    assert float(module.weight.grad) == float(expected) != 1.9921875


def test_parts_kept_apart_come_out_as_they_were() -> None:
    """Gradients of 3w + 2w^2, the second kept apart, doubled on joining; a constant has none."""
    module = nn.Linear(1, 1, bias=False).double()
    weight = module.weight.detach().clone()
    executor = executor_of(module)
    for _ in range(2):
        executor.backward_aux((2 * module.weight.square()).sum())
    executor.backward_aux(torch.ones(()))
    executor.backward(3 * module.weight.sum())
    executor.add_aux(torch.tensor(2.0))
    torch.testing.assert_close(module.weight.grad, 3 + 2 * 2 * 4 * weight)
    executor.add_aux(torch.tensor(2.0))
    torch.testing.assert_close(module.weight.grad, 3 + 2 * 2 * 4 * weight)


def test_the_correction_of_parts_kept_apart_is_not_rounded_to_their_dtype() -> None:
    """In bf16 a factor would be off by up to 0.4 %."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    executor = executor_of(module)
    executor.backward_aux(1.9921875 * module.weight.sum())
    factor = torch.tensor(1.0021)
    executor.add_aux(factor)
    assert module.weight.grad is not None
    assert float(module.weight.grad) == float((1.9921875 * factor).bfloat16()) != 1.9921875


def test_a_model_without_gradients_has_norm_zero() -> None:
    assert float(executor_of(model()).clip(1.0)) == 0.0


def test_evaluation_mode_of_the_model_lasts_until_the_next_update() -> None:
    class Averaging(torch.optim.SGD):
        mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

        def train(self) -> None:
            self.mode = "train"

    module = model().train()
    optimizer = Averaging(module.parameters(), lr=0.1)
    executor = NativeExecutor(Alone(module), optimizer, CPU)
    with contextlib.suppress(KeyError), executor.evaluating():
        assert (module.training, optimizer.mode) == (False, "eval")
        raise KeyError
    assert (module.training, optimizer.mode) == (False, "train")
    executor.run_step(group(1), Hooks(executor))
    assert module.training


def test_an_update_without_targets_leaves_weights_and_optimizer_alone() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    executor = NativeExecutor(Alone(module), optimizer, CPU)
    executor.run_step(group(1), Hooks(executor))  # momentum is there now
    before = [p.clone() for p in module.parameters()]
    assert not executor.run_step(group(1, denominator=0.0), Hooks(executor, factor=0.0)).applied
    assert all(map(torch.equal, module.parameters(), before))
    assert executor.run_step(group(1), Hooks(executor)).applied, "the next one is made"
    # The loss brought its own weight, of which the count of targets knows nothing.
    assert executor.run_step(group(1, denominator=0.0), Hooks(executor, weight=0.5)).applied


def test_nothing_to_clip() -> None:
    executor = executor_of(model())
    assert float(executor.clip(0.0)) == 0.0


class Unusual(nn.Module):
    """A complex parameter before real ones, one without elements, and an embedding, whose gradient may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Embedding(4, 4, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = torch.fft.irfft(torch.fft.rfft(self.table(ids)) * self.wave, n=4)
        return made.square().mean() + self.empty.sum()


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_complex_and_sparse_gradients_are_clipped_together(max_norm: float | None) -> None:
    """A row that comes twice in a batch counts once in the norm, as the sum of both."""
    ours, theirs = Unusual(sparse=True), Unusual(sparse=False)
    executor = executor_of(ours)
    ids = torch.tensor([1, 3, 3])
    for module in (ours, theirs):
        module(ids).backward()
    norm = executor.clip(max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf))
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        torch.testing.assert_close(mine.grad.to_dense(), its.grad)


def test_auxiliary_gradients_lie_in_memory_as_their_parameters() -> None:
    """As autograd's own do: a fused kernel reads both side by side."""
    module = nn.Linear(3, 4, bias=False)
    executor = executor_of(module)
    executor.backward_aux(torch.einsum("ti,oi->to", torch.ones(5, 3), module.weight).square().sum())
    executor.add_aux(torch.tensor(1.0))
    assert module.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()
