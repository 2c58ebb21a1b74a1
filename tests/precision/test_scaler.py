"""The loss scaler against torch's own, and its one host read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import NonFiniteError
from windlass.core.trees import tensors_in
from windlass.engine.native import NativeExecutor
from windlass.precision.scaler import MAX_SKIPS_IN_A_ROW, LossScaler, UnitScaler, build_scaler
from windlass.transforms.alone import Alone

CPU = torch.device("cpu")
# What multiplies the loss of an update: ordinary numbers, and those that end in an overflow.
FACTORS = st.lists(
    st.sampled_from([1.0, 0.5, 3.0, float("inf"), float("nan"), 1e38]), min_size=1, max_size=25
)


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def twins() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@given(factors=FACTORS, interval=st.integers(1, 4), init=st.sampled_from([1.0, 65536.0, 3.0]))
@settings(max_examples=50)
def test_trajectory_equals_torchs_grad_scaler(factors: list[float], interval: int, init: float) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    ours = LossScaler(CPU, init_scale=init, growth_interval=interval)
    (model_a, optimizer_a), (model_b, optimizer_b) = twins(), twins()
    inputs = torch.ones(4, 3)
    skipped = 0
    for factor in factors:
        theirs.scale(model_a(inputs).sum() * factor).backward()
        theirs.unscale_(optimizer_a)
        theirs.step(optimizer_a)
        before = theirs.get_scale()
        theirs.update()
        skipped += theirs.get_scale() < before

        ours.scale(model_b(inputs).sum() * factor).backward()
        found = ours.unscale_(gradients(model_b.parameters()))
        if not ours.overflowed(found):
            optimizer_b.step()
        ours.update(found)

        assert ours.get_scale() == theirs.get_scale()
        for a, b in zip(model_a.parameters(), model_b.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        optimizer_a.zero_grad()
        optimizer_b.zero_grad()
    assert ours.skipped == skipped


def test_a_model_learns_in_fp16_with_a_scale_that_overflows_at_first() -> None:
    model, optimizer = twins()
    scaler = LossScaler(CPU, init_scale=2.0**40)
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(torch.ones(4, 3)) - 1.0).square().mean()
        scaler.scale(loss).backward()
        found = scaler.unscale_(gradients(model.parameters()))
        if not scaler.overflowed(found):
            optimizer.step()
        scaler.update(found)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert 0 < scaler.skipped < 40
    assert losses[-1] < 0.1 * losses[0]


def test_continues_from_its_state() -> None:
    first = LossScaler(CPU, growth_interval=3)
    fine, bad = torch.zeros(()), torch.ones(())
    for found in (fine, bad, fine, fine):
        first.overflowed(found)
        first.update(found)
    second = LossScaler(CPU, init_scale=1.0, growth_interval=3)
    second.load_state_dict(first.state_dict())
    assert second.skipped == 1
    for scaler in (first, second):
        scaler.update(fine)  # the third in a row: the scale grows
    assert first.get_scale() == second.get_scale() == 65536.0


def test_state_is_a_copy() -> None:
    scaler = LossScaler(CPU)
    state = scaler.state_dict()
    scaler.update(torch.ones(()))
    assert float(state["scale"]) == 65536.0


def test_an_overflow_at_every_scale_stops_the_run() -> None:
    scaler = LossScaler(CPU)
    bad = torch.ones(())
    for _ in range(MAX_SKIPS_IN_A_ROW - 1):
        assert scaler.overflowed(bad)
    with pytest.raises(NonFiniteError, match=f"the last {MAX_SKIPS_IN_A_ROW} updates were skipped"):
        scaler.overflowed(bad)


def test_good_updates_between_overflows_let_the_run_go_on() -> None:
    scaler = LossScaler(CPU)
    for _ in range(2 * MAX_SKIPS_IN_A_ROW):
        scaler.overflowed(torch.ones(()))
        scaler.overflowed(torch.zeros(()))
    assert scaler.skipped == 2 * MAX_SKIPS_IN_A_ROW


def test_half_precision_gradients_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="keep trainable weights in float32"):
        LossScaler(CPU).unscale_(gradients([parameter]))


def test_gradients_of_several_dtypes_and_none_are_unscaled() -> None:
    dtypes = (torch.float32, torch.float64, torch.complex64, torch.float32)
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters[:3]:
        parameter.grad = torch.full_like(parameter, 8.0)
    scaler = LossScaler(CPU, init_scale=4.0)
    assert not scaler.unscale_(gradients(parameters))
    assert [p.grad is None or p.grad.tolist() for p in parameters] == [[2.0, 2.0]] * 3 + [True]
    parameters[2].grad = torch.tensor([0, complex(0, float("inf"))])
    assert scaler.unscale_(gradients(parameters))


class OneDevice(TorchDispatchMode):
    """Kernels over lists of tensors take those of one device, which tensors without memory do not check."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "_foreach_" in str(func):
            assert len({tensor.device for tensor in tensors_in(args)}) == 1, func
        return func(*args, **(kwargs or {}))


def test_gradients_on_several_devices_are_unscaled_and_clipped_where_they_lie() -> None:
    """As of a sharded model that is kept on the host, and of one whose layers `device_map` puts on two GPUs."""
    cuda = torch.device("cuda", 0)
    with FakeTensorMode(), OneDevice():
        places = [cuda, CPU, torch.device("cuda", 1)]
        module = nn.ParameterList(torch.zeros(2, device=place) for place in places)
        for parameter in module:
            parameter.grad = torch.zeros_like(parameter)
        executor = NativeExecutor(
            Alone(module), torch.optim.SGD(module.parameters()), cuda, LossScaler(cuda, init_scale=4.0)
        )
        assert executor.clip(1.0).device == cuda
        executor.scale_again()
        executor.follow_scale(torch.zeros((), device=cuda))


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "_local_scalar_dense" in str(func) or "_to_copy" in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_reads_no_scalar_through_torch() -> None:
    scaler = LossScaler(CPU)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with _Reads() as reads:
        scaler.scale(torch.ones(()))
        found = scaler.unscale_(gradients([parameter]))
        scaler.overflowed(found)
        scaler.update(found)
    assert not [name for name in reads.seen if "_local_scalar_dense" in name]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_other_precisions_get_the_scaler_that_does_nothing(compute: str) -> None:
    scaler = build_scaler(PrecisionPlan(compute=compute), CPU)  # type: ignore[arg-type]
    loss = torch.ones(())
    assert isinstance(scaler, UnitScaler)
    assert scaler.scale(loss) is loss
    assert not scaler.overflowed(scaler.unscale_([]))
    assert scaler.state_dict() == {}
    assert scaler.skipped == 0


def test_fp16_gets_the_real_one_and_takes_over_from_a_run_without() -> None:
    scaler = build_scaler(PrecisionPlan(compute="fp16"), CPU)
    assert isinstance(scaler, LossScaler)
    scaler.load_state_dict({})
    assert scaler.get_scale() == 65536.0
