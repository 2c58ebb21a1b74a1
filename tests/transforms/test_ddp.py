"""Replicated data parallelism, in two processes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, ModelError
from windlass.core.world import world_from_environment
from windlass.dist.gang import current, join, leave
from windlass.transforms.ddp import DataParallel


@pytest.mark.dist
def test_compression_and_unused_parameters() -> None:
    on_ranks(2, check_replicas)


@pytest.mark.dist
def test_a_wrapper_made_in_the_middle_of_a_run_sums_to_the_same_bits() -> None:
    """As that of a loop of the user's own, which is resumed and has no batch before its first."""
    on_ranks(3, main)


# --- what each rank runs ----------------------------------------------------------------------------------------------


UPDATES = 6


class Crossed(nn.Module):
    """Gradients arrive in another order than that of the parameters. The buffer is one that PyTorch does not send."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(16, 5), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(1))  # which every forward of the wrapper shares
        self.register_buffer("history", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) * self.scale


def train(rank: int, plan: DistPlan, cuts: set[int]) -> list[Tensor]:
    """Weights at the end, of a run that is resumed at the updates in `cuts`."""
    model = Crossed()
    strategy = DataParallel(model, plan, current())
    for update in range(UPDATES):
        if update in cuts:
            resumed = Crossed()
            resumed.load_state_dict(model.state_dict())
            strategy.release()
            model, strategy = resumed, DataParallel(resumed, plan, current())
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * update + rank))
        strategy.model(inputs).square().sum().backward()
        strategy.check_reached()
        strategy.check_used()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    strategy.release()
    return [p.detach().clone() for p in model.parameters()]


def main() -> None:
    world = world_from_environment()
    join(world, torch.device("cpu"), timeout_seconds=60)
    for searches in (False, True):
        plan = DistPlan(find_unused_parameters=searches)
        whole = train(world.rank, plan, set())
        for cut in range(1, UPDATES):
            resumed = train(world.rank, plan, {cut})
            assert all(map(torch.equal, resumed, whole)), f"searches={searches}, resumed at update {cut}"
    leave()


LOW_RANK = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2, "min_compression_rate": 0.5}
AS_TEXT = {name: str(value) for name, value in LOW_RANK.items()}  # as flags give them


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def train_replica(
    model: nn.Module, rank: int, before_step: Callable[[], object] = lambda: None, steps: int = 5
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().sum().backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def by_hand(rank: int, hook: Any, state: Any = None) -> list[Tensor]:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return train_replica(model, rank)


def ours(rank: int, plan: DistPlan) -> list[Tensor]:
    strategy = DataParallel(network(), plan, current())

    def check() -> None:
        strategy.check_reached()
        strategy.check_used()

    with strategy.micro(last=True):
        return train_replica(strategy.model, rank, check)


def low_rank() -> Any:
    return powerSGD_hook.PowerSGDState(None, **LOW_RANK)


def compressed(rank: int) -> None:
    plain = by_hand(rank, None)
    wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    cases = [
        (DistPlan(comm_hook="fp16"), default_hooks.fp16_compress_hook, None),
        (DistPlan(comm_wrapper="fp16"), default_hooks.fp16_compress_hook, None),
        (DistPlan(comm_hook="power_sgd", comm_options=LOW_RANK), powerSGD_hook.powerSGD_hook, low_rank()),
        (DistPlan(comm_hook="power_sgd", comm_wrapper="fp16", comm_options=AS_TEXT), wrapped, low_rank()),
    ]
    for plan, hook, state in cases:
        found, wanted = ours(rank, plan), by_hand(rank, hook, state)
        assert all(map(torch.equal, found, wanted)), plan
        assert not all(map(torch.equal, found, plain)), f"{plan} compressed nothing"
    assert all(map(torch.equal, ours(rank, DistPlan()), plain))


def memory_is_forgotten_after_discarded_work(rank: int) -> None:
    plan = DistPlan(static_graph=True, comm_hook="power_sgd", comm_options=LOW_RANK)
    strategy = DataParallel(network(), plan, current())
    state = strategy._compression._state

    def backward() -> Tensor:
        loss = strategy.model(torch.ones(2, 16) * rank).sum()
        loss.backward()
        return loss

    strategy.warm_up(backward)
    assert (state.iter, len(state.error_dict), len(state.q_memory_dict)) == (0, 0, 0)


def refused_options() -> None:
    for plan, words in (
        (
            DistPlan(comm_hook="power_sgd", comm_options={"random_seed": "x"}),
            r"random_seed='x': must be a whole",
        ),
        (DistPlan(comm_options={"matrix_approximation_rank": 2}), "comm_hook is no"),
        (DistPlan(comm_hook="power_sgd", comm_options={"rank": 2}), r"comm_state_option\.rank=2"),
        (DistPlan(comm_hook="power_sgd", comm_options={"start_powerSGD_iter": 1}), "start_powerSGD_iter"),
        (DistPlan(comm_hook="batched_power_sgd"), "use power_sgd"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataParallel(network(), plan, current())


def bf16_is_refused_where_pytorch_refuses_it(rank: int) -> None:
    """Over gloo it does up to 2.13; later it computes what PyTorch's own hook does."""
    plan = DistPlan(comm_hook="bf16")
    try:
        wanted = by_hand(rank, default_hooks.bf16_compress_hook)
    except TypeError:
        with pytest.raises(ConfigError, match="comm_hook='bf16, wrapped by no': does not work here"):
            DataParallel(network(), plan, current())
        return
    assert all(map(torch.equal, ours(rank, plan), wanted))


def pytorchs_batched_form_still_fails(rank: int) -> None:
    """Why it is refused; when this fails, PyTorch has mended it."""
    with pytest.raises(AssertionError):
        by_hand(rank, powerSGD_hook.batched_powerSGD_hook, low_rank())


class Forked(nn.Module):
    """Two branches, of which a forward takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        out = self.left(inputs)
        return out + self.right(inputs) if both else out


def update(strategy: DataParallel, *takes_both: bool) -> None:
    for index, both in enumerate(takes_both):
        with strategy.micro(last=index == len(takes_both) - 1):
            strategy.model(torch.ones(1, 2), both).sum().backward()
    strategy.check_reached()
    strategy.check_used()
    strategy.module.zero_grad()


def unused() -> None:
    names = r"2 of 4 trained parameters: right\.weight, right\.bias.*ddp_find_unused_parameters=True"
    with pytest.raises(ModelError, match=names):
        update(DataParallel(Forked(), DistPlan(), current()), False)
    with pytest.raises(ModelError, match=names):
        update(DataParallel(Forked(), DistPlan(), current()), True, False)


def reentrant() -> nn.Module:
    """A model whose blocks are recomputed within the backward, as Hugging Face's models note it."""
    model = Forked()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    model._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=True)  # type: ignore[assignment]
    return model


def searched_unless_that_would_mislead() -> None:
    """What a Trainer asks for by default."""
    plan = DistPlan(find_unused_parameters=None)
    strategy = DataParallel(Forked(), plan, current())
    ran: list[bool] = []
    strategy.warm_up(lambda: ran.append(True))  # type: ignore[func-returns-value, arg-type]
    assert not ran, "the search keeps the buckets as they are, so nothing must be run before"
    update(strategy, True)
    assert not strategy.model._has_rebuilt_buckets
    update(strategy, False)  # one that is unused in a later batch only
    for unsearched in (
        DataParallel(reentrant(), plan, current()),
        DataParallel(Forked(), DistPlan(find_unused_parameters=None, static_graph=True), current()),
    ):
        assert not unsearched.model.find_unused_parameters


def nothing_to_complain_of() -> None:
    for plan in (DistPlan(find_unused_parameters=True), DistPlan(static_graph=True)):
        strategy = DataParallel(Forked(), plan, current())
        update(strategy, False)
        update(strategy, False)
    frozen = Forked()
    frozen.right.requires_grad_(False)
    update(DataParallel(frozen, DistPlan(), current()), False)
    strategy = DataParallel(Forked(), DistPlan(), current())
    update(strategy, False, True)
    watched = [p for p in strategy.module.parameters() if p._post_accumulate_grad_hooks]
    assert watched == [next(strategy.module.parameters())], "all are watched in the first update only"
    with pytest.raises(ModelError, match="bypassed"):
        strategy.check_reached()


def alone_with_it(rank: int) -> None:
    """Where only one rank leaves a branch out, that rank names it, and the other is not left with wrong gradients."""
    strategy = DataParallel(copy.deepcopy(Forked()), DistPlan(), current())
    if rank == 1:
        with pytest.raises(ModelError, match="right"):
            update(strategy, False)


def check_replicas() -> None:
    world = world_from_environment()
    gang = join(world, torch.device("cpu"), timeout_seconds=60)
    compressed(world.rank)
    memory_is_forgotten_after_discarded_work(world.rank)
    refused_options()
    bf16_is_refused_where_pytorch_refuses_it(world.rank)
    pytorchs_batched_form_still_fails(world.rank)
    unused()
    nothing_to_complain_of()
    searched_unless_that_would_mislead()
    gang.barrier()
    alone_with_it(world.rank)
    leave()
