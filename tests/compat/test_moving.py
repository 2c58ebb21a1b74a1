"""Models and modules that are moved for a time."""

from __future__ import annotations

import torch
from torch import nn

from windlass.compat.big_models.model_hooks import add_hook_to_module
from windlass.compat.big_models.module_tensors import CpuOffload, UserCpuOffloadHook, align_module_device
from windlass.compat.big_models.offloaded import AlignDevicesHook


def test_aligned_for_a_while() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    with align_module_device(layer, "meta"):
        pass
    assert torch.equal(layer.weight, weight)
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    with align_module_device(layer):
        assert not layer.weight.is_meta
    assert layer.weight.is_meta
    plain = nn.Linear(2, 2)
    plain.weight.data.copy_(weight)
    with align_module_device(plain, "cpu"):
        assert torch.equal(plain.weight, weight)
    with align_module_device(plain):
        assert torch.equal(plain.weight, weight)


def test_a_weight_with_two_names_in_one_module_is_moved_once() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.tied = layer.weight
    with align_module_device(layer, "meta"):
        assert layer.tied is layer.weight
        assert layer.tied.is_meta
    assert layer.tied is layer.weight is weight


def test_a_pipeline_offloads_the_model_before() -> None:
    moves: list[str] = []

    class Noting(nn.Linear):
        def to(self, device: object) -> Noting:  # type: ignore[override]
            moves.append(f"{self.in_features}:{device}")
            return self

    first, second = Noting(1, 2), Noting(2, 3)
    hook = CpuOffload("cpu")
    add_hook_to_module(first, hook)
    user = UserCpuOffloadHook(first, hook)
    add_hook_to_module(second, CpuOffload("cpu", prev_module_hook=user))
    moves.clear()
    second(first(torch.ones(1)))
    assert moves == ["1:cpu", "1:cpu", "2:cpu"]
    user.remove()
    assert not hasattr(first, "_hf_hook")
