"""Muon with AdamW beside it: which parameters each gets, and that each is torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optim.helpers import Net, decay_groups
from torch import Tensor, nn

from windlass.optim.optimizers.muon import MuonWithAdamW, orthogonalized


def names_of(model: nn.Module, groups: list[dict[str, Any]], use: bool) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in groups if group["use_muon"] == use for p in group["params"]}


def test_matrices_of_hidden_layers_are_muons() -> None:
    model = Net()
    groups = MuonWithAdamW.arrange(model, decay_groups(model, 0.1))
    muons = {"layers.0.attn.weight", "layers.1.attn.weight", "q_norm.weight"}
    assert names_of(model, groups, True) == muons
    assert names_of(model, groups, False) == {n for n, _ in model.named_parameters()} - muons


def test_a_tied_head_is_adamws() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    groups = MuonWithAdamW.arrange(model, decay_groups(model, 0.1))
    others = names_of(model, groups, False)
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= others
    muons = [n for n, p in model.named_parameters() if p.dim() == 2 and ".h." in n]
    assert names_of(model, groups, True) == set(muons)


def test_without_matrices_it_says_that_all_is_adamws(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    for trained, said in (("layers.0", 0), ("embed", 1)):
        parameters = [p for name, p in model.named_parameters() if name.startswith(trained)]
        MuonWithAdamW(MuonWithAdamW.arrange(model, [{"params": parameters}]))
        assert caplog.text.count("AdamW updates all parameters") == said


def test_each_half_is_torchs_to_the_bit_also_after_its_state_was_loaded() -> None:
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    ours = MuonWithAdamW(MuonWithAdamW.arrange(model, decay_groups(model, 0.1)), lr=0.01)
    groups = MuonWithAdamW.arrange(twin, decay_groups(twin, 0.1))
    theirs = [
        torch.optim.Muon([g for g in groups if g["use_muon"]], lr=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([g for g in groups if not g["use_muon"]], lr=0.01),
    ]
    for step in range(5):
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        if step == 3:
            ours.load_state_dict(ours.state_dict())
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_what_other_operations_make_orthogonal_is_torchs_but_for_rounding(shape: tuple[int, int]) -> None:
    """For devices of PyTorch/XLA, where torch's own would be computed on the host."""
    matrix, parameter = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.zeros(shape)
    torchs = torch.optim.Muon([parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    parameter.grad = matrix
    torchs.step()
    settings = torchs.param_groups[0]
    found = orthogonalized(matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"])
    scale = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.allclose(found.float() * scale, -parameter, atol=0.08)  # bf16, of values below 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_in_bfloat16_is_that_of_the_gradients(nesterov: bool) -> None:
    """Before torch 2.15, its Muon divides the momentum itself by its norm, without Nesterov's term."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 10, dtype=torch.bfloat16))
    start, gradient = parameter.detach().clone(), 7 * torch.randn(6, 10).bfloat16()
    options: dict[str, Any] = {"momentum": 0.5, "nesterov": nesterov, "adjust_lr_fn": "original"}
    ours = MuonWithAdamW([{"params": [parameter], "use_muon": True}], lr=0.1, **options)
    parameter.grad = gradient.clone()
    ours.step()
    assert torch.equal(ours.state[parameter]["momentum_buffer"], gradient / 2)
    assert torch.equal(parameter.grad, gradient)
    exact = orthogonalized(gradient.float(), (3.4445, -4.775, 2.0315), 5, 1e-7)
    torch.testing.assert_close((start - parameter) / 0.1, exact.bfloat16(), rtol=0, atol=0.2)


def test_a_schedule_sets_the_rate_of_both() -> None:
    model = Net()
    optimizer = MuonWithAdamW(MuonWithAdamW.arrange(model, decay_groups(model, 0.1)), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_group_that_does_not_say_which_is_refused() -> None:
    with pytest.raises(ValueError, match="each group needs use_muon"):
        MuonWithAdamW(nn.Linear(2, 2).parameters())
    optimizer = MuonWithAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
    with pytest.raises(ValueError, match="each group needs use_muon"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.ones(2))], "use_muon": True}])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("copied", [lambda optimizer: optimizer, copy.deepcopy])
def test_a_group_that_is_added_later_is_updated_as_if_it_had_been_there(
    first: bool, later: bool, copied: Callable[[Any], Any]
) -> None:
    def updated(at_once: bool) -> list[Tensor]:
        weights = [nn.Parameter(torch.eye(2) + k) for k in range(2)]
        groups = [{"params": [w], "use_muon": use} for w, use in zip(weights, (first, later), strict=True)]
        optimizer = MuonWithAdamW(groups if at_once else groups[:1], lr=0.1, momentum=0.5, betas=(0.5, 0.6))
        if not at_once:
            optimizer.add_param_group(groups[1])
        optimizer = copied(optimizer)
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for step in range(2):
            for weight in weights:
                weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0 + step]])
            optimizer.step()
        return [weight.detach() for weight in weights]

    for one, other in zip(updated(at_once=False), updated(at_once=True), strict=True):
        assert torch.equal(one, other)


def test_a_group_without_parameters_is_passed_over() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    MuonWithAdamW([{"params": [weight], "use_muon": True}, {"params": [], "use_muon": True}], lr=0.1).step()
    assert not torch.equal(weight, torch.ones(2, 2))
