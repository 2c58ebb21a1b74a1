from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from windlass.checkpoint.codec import load_state, save_state
from windlass.checkpoint.optimizer_state import load_optimizer_state, save_optimizer_state
from windlass.core.errors import CheckpointError

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.1, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    model = model_of()
    if name != "lbfgs":  # which takes contiguous parameters alone
        # Fused kernels read a parameter and its state side by side in memory.
        model[0].weight = nn.Parameter(torch.randn(3, 4).T)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for seed in range(3):
        step(model, optimizer, seed)
    save_state(tmp_path / "optimizer", save_optimizer_state(optimizer, model))

    other = copy.deepcopy(model)
    resumed = OPTIMIZERS[name](list(other.parameters()))
    load_optimizer_state(resumed, other, load_state(tmp_path / "optimizer"))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, resumed, seed)
    assert equal(model, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_state_returns_to_its_device(options: dict[str, bool], tmp_path: Path) -> None:
    model = model_of().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    data = torch.ones(2, 3, device="cuda")
    model(data).sum().backward()
    optimizer.step()
    save_state(tmp_path / "optimizer", save_optimizer_state(optimizer, model))
    resumed = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    load_optimizer_state(resumed, model, load_state(tmp_path / "optimizer"))
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert resumed.state[parameter][key].device == value.device
            assert torch.equal(resumed.state[parameter][key], value)


def groups_of(model: nn.Module, turned: bool) -> list[dict[str, object]]:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, object]] = [
        {"params": decay, "weight_decay": 0.5},
        {"params": rest, "weight_decay": 0.0},
    ]
    if turned:
        return [{"params": rest[::-1], "weight_decay": 0.0}, {"params": decay[::-1], "weight_decay": 0.5}]
    return groups


def test_order_of_groups_and_parameters_may_change() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(groups_of(model, False), lr=0.01)
    step(model, optimizer, 0)
    other = copy.deepcopy(model)
    resumed = torch.optim.AdamW(groups_of(other, True), lr=0.9)
    load_optimizer_state(resumed, other, save_optimizer_state(optimizer, model))
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.0, 0.5]
    step(model, optimizer, 1)
    step(other, resumed, 1)
    assert equal(model, other)


@pytest.mark.parametrize("name", ["adamw", "momentum", "rmsprop"])
def test_a_state_follows_the_dtype_of_its_parameters_as_in_torch(name: str) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    step(model, optimizer, 0)
    mine, theirs = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    loaded, wanted = (OPTIMIZERS[name](list(wide.parameters())) for wide in (mine, theirs))
    load_optimizer_state(loaded, mine, save_optimizer_state(optimizer, model))
    wanted.load_state_dict(optimizer.state_dict())
    for wide, one in ((mine, loaded), (theirs, wanted)):
        for parameter in wide.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        one.step()
    assert equal(mine, theirs)


def test_a_subclass_of_the_script_keeps_more_precise_moments_than_its_parameters() -> None:
    class Precise(torch.optim.AdamW):
        pass

    model = model_of().bfloat16()
    optimizer, loaded = (Precise(model.parameters()) for _ in range(2))
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    load_optimizer_state(loaded, model, save_optimizer_state(optimizer, model))
    for parameter in model.parameters():
        assert torch.equal(loaded.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_loading_keeps_objects_and_tensors() -> None:
    model, rate = model_of(), torch.tensor(0.25)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=rate, foreach=False)
    step(model, optimizer, 0)
    saved = copy.deepcopy(save_optimizer_state(optimizer, model))
    step(model, optimizer, 1)
    rate.fill_(0.5)
    optimizer.state[model[0].weight]["added_since"] = torch.ones(2)
    groups = optimizer.param_groups
    moments = {p: optimizer.state[p]["exp_avg"] for p in model.parameters()}
    load_optimizer_state(optimizer, model, saved)
    assert optimizer.param_groups is groups
    assert all(optimizer.state[p]["exp_avg"] is moment for p, moment in moments.items())
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], saved["state"]["0.weight"]["exp_avg"])
    assert "added_since" not in optimizer.state[model[0].weight]
    assert groups[0]["lr"] is rate
    assert rate == 0.25
    assert "param_names" not in saved["groups"][0]["options"], "those of the names are this run's"


def test_the_loaded_state_is_the_optimizers_own() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    saved = copy.deepcopy(save_optimizer_state(optimizer, model))
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_optimizer_state(fresh, model, saved)
    kept = saved["state"]["0.weight"]["exp_avg"].clone()
    step(model, fresh, 1)
    assert torch.equal(saved["state"]["0.weight"]["exp_avg"], kept)


def test_a_parameter_that_was_never_updated_starts_as_it_did() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    step(model, optimizer, 0)
    saved = save_optimizer_state(optimizer, model)
    assert "3.weight" not in saved["state"]
    assert "3.weight" in saved["shapes"]
    for parameter in model[3].parameters():
        parameter.requires_grad_(True)
    live = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, live, 1)
    load_optimizer_state(live, model, saved)
    assert model[3].weight not in live.state


def test_implementation_flags_are_this_machines() -> None:
    model = model_of()
    saved = save_optimizer_state(torch.optim.AdamW(model.parameters(), lr=0.3, foreach=True), model)
    live = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    load_optimizer_state(live, model, saved)
    group = live.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"]) == (True, None, 0.3)


def test_wrapped_names_are_the_bare_ones() -> None:
    model = model_of()
    wrapped = nn.ModuleDict({"module": model})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    assert list(save_optimizer_state(optimizer, wrapped)["state"]) == list(
        save_optimizer_state(optimizer, model)["state"]
    )


def test_another_model_is_refused_with_shapes_and_untouched() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    live = torch.optim.AdamW(other.parameters(), lr=0.5)
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(live, other, save_optimizer_state(optimizer, model))
    assert "0.weight is [4, 3] in the checkpoint and [5, 3] in the model" in str(caught.value)
    assert "2 saved ones are not trained here: 3.weight, 3.bias" in str(caught.value)
    assert live.param_groups[0]["lr"] == 0.5
    assert not live.state


def test_the_state_of_another_kind_of_optimizer_is_refused_and_one_of_the_same_options_is_not() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    model = model_of()
    step(model, optimizer := torch.optim.AdamW(model.parameters(), lr=0.01), 0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds an option
    state = save_optimizer_state(optimizer, model)
    # Of another class the first would end in the next update, the second would start its momentum again, and the third
    # would be an AdamW.
    for kind in (torch.optim.Adafactor, torch.optim.SGD, torch.optim.Adam):
        live = kind(model.parameters(), lr=0.1)
        said = rf"optim: this run's optimizer is {kind.__name__}, and the checkpoint's is AdamW, with other options"
        with pytest.raises(CheckpointError, match=said):
            load_optimizer_state(live, model, state)
        assert not live.state
    same = Renamed(model.parameters())
    del same.param_groups[0]["foreach"]  # which does not change results
    load_optimizer_state(same, model, state)


def test_groups_of_other_parameters_are_refused() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(groups_of(model, False), lr=0.01)
    live = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(CheckpointError, match="group 0 of the optimizer holds other parameters"):
        load_optimizer_state(live, model, save_optimizer_state(optimizer, model))


def test_a_group_without_parameters_that_no_saved_one_matches_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(groups_of(model, False), lr=0.01)
    live = torch.optim.AdamW([*groups_of(model, False), {"params": []}], lr=0.01)
    with pytest.raises(CheckpointError, match="group 2 of the optimizer holds other parameters"):
        load_optimizer_state(live, model, save_optimizer_state(optimizer, model))


def test_a_state_of_one_group_is_loaded_into_several() -> None:
    """Earlier versions saved one group if there was no weight decay."""
    model, other = model_of(), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    step(model, optimizer, 0)
    other.load_state_dict(model.state_dict())
    groups = [{**group, "weight_decay": 0.0} for group in groups_of(other, False)]
    resumed = torch.optim.AdamW([*groups, {"params": []}], lr=0.5)
    load_optimizer_state(resumed, other, save_optimizer_state(optimizer, model))
    assert [(group["lr"], group["weight_decay"]) for group in resumed.param_groups] == [(0.01, 0.0)] * 3
    step(model, optimizer, 1)
    step(other, resumed, 1)
    assert equal(model, other)


def test_groups_without_parameters_keep_their_options_apart() -> None:
    model = nn.Linear(2, 2)

    def with_rates(*rates: float) -> torch.optim.Optimizer:
        members = (list(model.parameters()), [], [])
        return torch.optim.SGD([{"params": own, "lr": lr} for own, lr in zip(members, rates, strict=True)])

    state = save_optimizer_state(with_rates(0.1, 0.2, 0.3), model)
    load_optimizer_state(loaded := with_rates(1.0, 1.0, 1.0), model, state)
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.2, 0.3]


def test_a_parameter_outside_the_model_is_refused() -> None:
    stray = nn.Parameter(torch.ones(7))
    with pytest.raises(CheckpointError, match=r"parameter 0 of group 0 \(shape \[7\]\)"):
        save_optimizer_state(torch.optim.SGD([stray], lr=0.1), model_of())


@pytest.mark.parametrize(
    "state", [{}, {"shapes": 3}, {"shapes": {}, "state": 3}, {"shapes": {}, "state": {"a": {}}}]
)
def test_a_malformed_state_is_one_clear_error(state: dict[str, object]) -> None:
    model = nn.Sequential()
    with pytest.raises(CheckpointError, match=r"malformed|not one that Windlass saved"):
        load_optimizer_state(_no_parameters(), model, state)


def _no_parameters() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return optimizer
