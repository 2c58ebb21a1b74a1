"""The default optimizer: torch's AdamW, to the bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from torch import Tensor, nn

from windlass.optim.optimizers.adamw import AdamW

SCRIPT = Path(__file__).with_name("sharded_adamw.py")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 3, dtype=torch.bfloat16)
    )


def groups(net: nn.Module) -> list[dict[str, Any]]:
    single = [p for p in net.parameters() if p.dtype is torch.float32]
    return [
        {"params": [p for p in single if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in single if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in net.parameters() if p.dtype is torch.bfloat16]},
    ]


def trained(
    cls: type[torch.optim.AdamW], change: Callable[[Any, int], None], **options: Any
) -> tuple[Any, ...]:
    """Weights and optimizer state after six updates; `change` is called before each."""
    net = model()
    optimizer = cls(groups(net), **{"lr": 0.01, "fused": True, **options})
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        change(optimizer, step)
        optimizer.step()
    return [p.detach() for p in net.parameters()], optimizer.state_dict()["state"]


def nothing(optimizer: Any, step: int) -> None:
    pass


def without_gradients(optimizer: Any, step: int) -> None:
    """Some parameters have none in their first update, some later, a whole group in one."""
    for index, group in enumerate(optimizer.param_groups):
        group["params"][0].grad = None if step in (0, 3) else group["params"][0].grad
        for parameter in group["params"] if index == step else []:
            parameter.grad = None


def schedule(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (step + 1)


def tensor_rate(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


def maximize_later(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["maximize"] = step > 2


def scaled(optimizer: Any, step: int) -> None:
    """What torch's GradScaler leaves to the kernel."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(step == 2))


def loaded(optimizer: Any, step: int) -> None:
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def one_more_group(optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.add_param_group(
            {"params": [optimizer.param_groups[0]["params"].pop()], "weight_decay": 0.3}
        )


def mixed(optimizer: Any, step: int) -> None:
    """One group of two dtypes."""
    if len(optimizer.param_groups) == 3:
        optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        without_gradients,
        schedule,
        tensor_rate,
        maximize_later,
        scaled,
        loaded,
        one_more_group,
        mixed,
    ],
)
def test_it_updates_as_torch_does(change: Callable[[Any, int], None]) -> None:
    torch.testing.assert_close(trained(AdamW, change), trained(torch.optim.AdamW, change), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"fused": None}, {"eps": 1e-3}])
def test_options_are_those_of_torch(options: dict[str, Any]) -> None:
    ours, theirs = trained(AdamW, nothing, **options), trained(torch.optim.AdamW, nothing, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_kernel_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above compare torch with itself."""

    def torchs(*rest: Any, **options: Any) -> None:
        raise AssertionError("torch's own update")

    net = model()
    optimizer = AdamW(groups(net), lr=0.01, fused=True)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        monkeypatch.setitem(inspect.unwrap(torch.optim.Adam.step).__globals__, "adam", torchs)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(AssertionError, match="torch's own update"):
        optimizer.step()


def test_a_closure_is_called_with_gradients() -> None:
    net = nn.Linear(2, 1)
    optimizer = AdamW(net.parameters(), lr=0.01, fused=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2)).square().sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_hooks_run_once_in_each_step(amsgrad: bool) -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch wraps the step of a class when one is made
    net = nn.Linear(2, 1)
    optimizer = AdamW(net.parameters(), lr=0.01, fused=True, amsgrad=amsgrad)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    assert calls == ["before", "after"] * 2


def test_profilers_see_its_step() -> None:
    net = nn.Linear(2, 1)
    optimizer = AdamW(net.parameters(), lr=0.01, fused=True)
    net(torch.ones(2)).sum().backward()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
def test_a_copy_goes_on(copied: Callable[[Any], Any]) -> None:
    net = nn.Linear(2, 1)
    optimizer = AdamW(net.parameters(), lr=0.01, fused=True)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    other = copied(optimizer)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in other.param_groups[0]["params"]]
    other.step()
    assert all((p != old).all() for p, old in zip(other.param_groups[0]["params"], before, strict=True))


@pytest.mark.dist
def test_sharded_parameters_are_updated_as_torch_does(tmp_path: Path) -> None:
    launch(2, SCRIPT)
