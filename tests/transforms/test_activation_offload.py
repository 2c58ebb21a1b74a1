"""Activations on the host: what moves, what stays, how often it is copied, and that gradients keep their bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.transforms.activation_offload import MIN_BYTES, ActivationOffload, DirectLane


class Counted(DirectLane):
    """Copies of tensors of the host, which replaces a device here, and a record of them."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.back: list[int] = []

    def to_host(self, block: Tensor) -> tuple[Tensor, Any]:
        self.left.append(block.numel())
        return super().to_host(block)

    def to_device(self, copy: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        self.back.append(copy.numel())
        return super().to_device(copy, device)


class Late(Counted):
    """Copies that hold other values until the computation waits for them."""

    def to_host(self, block: Tensor) -> tuple[Tensor, Any]:
        self.left.append(block.numel())
        copied = torch.full_like(block, -1)
        return copied, lambda: copied.copy_(block)

    def to_device(self, copy: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        self.back.append(copy.numel())
        block = torch.full_like(copy, -1)
        return block, lambda: block.copy_(copy)

    def wait(self, token: Any) -> None:
        token()

    def is_done(self, token: Any) -> bool:
        return False


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, dim=-1)
        seen = torch.ones(1, x.shape[1], dtype=torch.bool).expand(x.shape[1], -1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + self.drop(torch.tanh(self.out(attended.transpose(1, 2).flatten(2))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def inputs() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(
    model: nn.Module, mover: ActivationOffload | None, run: Callable[[Tensor], Tensor], dtype: Any = None
) -> list[Tensor]:
    torch.manual_seed(2)
    x = inputs()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        if mover is None:
            loss = run(x).square().mean()
        else:
            with mover.saving():
                loss = run(x).square().mean()
    loss.backward()
    found = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("lane", [Counted, Late])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_have_the_same_bits(lane: type[Counted], dtype: Any) -> None:
    model, made = network(), lane()
    mover = ActivationOffload(lambda device: made, min_bytes=0)
    plain = gradients(model, None, model, dtype)
    for _ in range(2):
        ours = gradients(model, mover, model, dtype)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert made.left
    assert len(made.back) == len(made.left)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_recomputation_the_inputs_of_blocks_move(reentrant: bool) -> None:
    model, made = network(), Late()
    mover = ActivationOffload(lambda device: made, min_bytes=0)

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    plain = gradients(model, None, run)
    torch.manual_seed(2)
    x = inputs()
    with mover.saving():  # around the backward too, in which blocks run again
        loss = run(x).square().mean()
        loss.backward()
    ours = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))  # type: ignore[arg-type]
    assert made.left == [80] * 4  # three inputs, and what the loss saves


def moved(run: Callable[[], Tensor], **options: Any) -> Counted:
    made = Counted()
    with ActivationOffload(lambda device: made, **{"min_bytes": 0} | options).saving():
        run().sum().backward()
    return made


def test_memory_that_is_saved_twice_is_copied_once() -> None:
    x = torch.randn(4, 6, requires_grad=True).mul(1)
    made = moved(lambda: x.exp() + x.sin() + x.view(6, 4).sin().view(4, 6) + x.t().cos().t())
    assert made.left == [24, 24]  # x, and the result of exp
    assert made.back == [24, 24]


def test_memory_that_was_changed_is_copied_again() -> None:
    x = torch.zeros(4, requires_grad=True)
    y = x + 1

    def run() -> Tensor:
        first = y.sin()
        y.mul_(2)
        return first + y.sin()

    made = moved(run)
    assert made.left == [4, 4]
    torch.testing.assert_close(x.grad, torch.full((4,), 1.0).cos() + 2 * torch.full((4,), 2.0).cos())


def test_memory_that_is_used_again_by_another_tensor_is_copied() -> None:
    made, mover = Counted(), None
    mover = ActivationOffload(lambda device: made, min_bytes=0)
    x = torch.ones(1000, requires_grad=True)
    with mover.saving():
        total = torch.zeros(())
        for factor in range(1, 20):
            total = total + (x * factor).sin().sum()  # the product is freed at once: the next has its address
        total.backward()
    assert made.left == [1000] * 19
    expected = sum(f * torch.cos(torch.tensor(float(f))) for f in range(1, 20))
    torch.testing.assert_close(x.grad, torch.full((1000,), float(expected)))


def test_parameters_and_their_views_and_casts_stay() -> None:
    layer = nn.Linear(16, 16)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    x = torch.randn(2, 16, requires_grad=True)
    assert moved(lambda: frozen(layer(x) * 1)).left == [32]  # x
    with torch.autocast("cpu", torch.bfloat16):
        assert 256 not in moved(lambda: layer(layer(x)).float()).left


def test_small_tensors_stay() -> None:
    small = torch.randn(MIN_BYTES // 4 - 1, requires_grad=True).mul(1)
    large = torch.randn(MIN_BYTES // 4, requires_grad=True).mul(1)
    assert moved(lambda: small.sin(), min_bytes=MIN_BYTES).left == []
    assert moved(lambda: large.sin(), min_bytes=MIN_BYTES).left == [MIN_BYTES // 4]


def test_slices_and_expanded_tensors_move_without_their_gaps() -> None:
    x = torch.randn(8, 90, requires_grad=True).mul(1)
    row = torch.randn(1, 10, requires_grad=True).mul(1)
    made = moved(lambda: x[:, :10].sin() * row.expand(8, 10))
    assert sorted(made.left) == [10, 80, 80]


def test_a_second_backward_through_the_graph() -> None:
    x = torch.randn(4, requires_grad=True)
    made = Late()
    with ActivationOffload(lambda device: made, min_bytes=0).saving():
        y = (x * 1).sin().exp().sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    x.grad = None
    y.backward()
    assert torch.equal(x.grad, once)


def test_the_next_blocks_are_fetched_before_they_are_needed() -> None:
    made = Counted()
    mover = ActivationOffload(lambda device: made, min_bytes=0)
    x = torch.randn(4, requires_grad=True)
    seen: list[int] = []
    with mover.saving():
        y = x
        for _ in range(6):
            y = (y * 1).sin()
            y.register_hook(lambda gradient: seen.append(len(made.back)))
        y.sum().backward()
    # Before the hook of the result nothing was fetched; after its node, the node's tensor and the next three.
    assert seen == [0, 4, 5, 6, 6, 6]


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    made = Counted()
    mover = ActivationOffload(lambda device: made, min_bytes=0)
    for _ in range(3):
        with mover.saving():
            (torch.randn(4, requires_grad=True) * 1).sin().sum()
    twin = copy.deepcopy(mover)
    assert twin is not mover
    assert made.back == []


def test_on_a_cpu_nothing_moves() -> None:
    model, mover = network(), ActivationOffload(min_bytes=0)
    plain = gradients(model, None, model)
    ours = gradients(model, mover, model)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.gpu
def test_on_a_device_memory_is_freed_and_copies_overlap() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(16))).cuda()
    x = torch.randn(4096, 2048, device="cuda", requires_grad=True)

    def run(mover: ActivationOffload | None) -> tuple[list[Tensor], int]:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if mover is None:
            loss = model(x).square().mean()
        else:
            with mover.saving():
                loss = model(x).square().mean()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        return [p.grad.clone() for p in model.parameters()], kept  # type: ignore[union-attr]

    plain, all_of_it = run(None)
    mover = ActivationOffload()
    ours, rest = run(mover)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert rest < all_of_it / 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(mover)
    events = [e for e in profile.events() if str(e.device_type).endswith("CUDA")]
    copies = [e.time_range for e in events if "Memcpy" in e.name and e.time_range.elapsed_us() > 50]
    kernels = [e.time_range for e in events if "gemm" in e.name.lower()]
    beside = [c for c in copies if any(k.start < c.end and c.start < k.end for k in kernels)]
    assert len(beside) > len(copies) / 2
