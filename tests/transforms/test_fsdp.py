"""Sharded models: several processes against one, and the model of one process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.transforms import fsdp_ranks
from tests.transforms.fsdp_ranks import (
    BLOCKS,
    carried_state,
    compare,
    low_precision,
    model,
    optimizer_of,
    same_tensors,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from windlass.checkpoint.export import ExportOptions, export_file
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.optimizer_state import save_optimizer_state
from windlass.checkpoint.store import Store
from windlass.checkpoint.stored import open_folder
from windlass.checkpoint.weights import load_weights
from windlass.config.plan import DistPlan, ShardPlan
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.gang import Gang, leave
from windlass.dist.sharded import whole
from windlass.engine.native import NativeExecutor
from windlass.transforms.fsdp import FullyShardedModel
from windlass.transforms.fsdp_groups import groups_of


@pytest.mark.dist
@pytest.mark.parametrize("updates", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_sharded_training_is_that_of_one_process(updates: int, tmp_path: Path) -> None:
    for world in (4, 2):  # the second reads what the first wrote
        on_ranks(world, fsdp_ranks.main, tmp_path, updates, timeout=400)
    states = [parts_in_one_process(tmp_path / f"checkpoint-{world}") for world in (4, 2)]
    assert same_tensors(*(weights for weights, _ in states))
    one, other = (optimizer["state"] for _, optimizer in states)
    assert one.keys() == other.keys()
    assert all(same_tensors(one[name], other[name]) for name in one)
    export_file(open_folder(tmp_path / "checkpoint-4"), tmp_path / "merged.safetensors", ExportOptions())
    module = model(9)
    load_weights(tmp_path / "merged.safetensors", module)
    assert same_tensors(dict(module.state_dict()), states[0][0])


def parts_in_one_process(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a plain model and its optimizer make of the parts that several ranks wrote."""
    module = model(9)
    optimizer = optimizer_of(module)
    checkpoint = CheckpointManager(Store(folder.parent)).load(folder)
    checkpoint.load_weights(module)
    checkpoint.load_optimizer(optimizer, module)
    return dict(module.state_dict()), save_optimizer_state(optimizer, module)


def test_a_world_of_one(tmp_path: Path) -> None:
    gang = Gang()
    try:
        compare(gang, ShardPlan(**BLOCKS), 3, 2)
        compare(gang, ShardPlan(cpu_offload=True, recompute=True, ignored="blocks.0", **BLOCKS), 3, 2)
        compare(gang, ShardPlan(recompute=True, recompute_offload=True, **BLOCKS), 3, 2)
        carried_state(gang, tmp_path)
        low_precision(gang)
    finally:
        leave()
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
def test_gradients_kept_on_the_host_beside_others_on_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device, gang = torch.device("cuda", 0), Gang()
    plan = DistPlan(strategy="fsdp", shard=ShardPlan(cpu_offload=True, **BLOCKS))
    expected, module = model().to(device), model()
    try:
        strategy = FullyShardedModel(module, plan, gang, device)
        executor = NativeExecutor(strategy, optimizer_of(module), device)
        for one in (expected, module):
            one(torch.ones(1, 4, dtype=torch.long, device=device)).square().mean().backward()
        norm = executor.clip(0.01, rescale=torch.tensor(2.0, device=device))
        assert {p.grad.device.type for p in module.parameters() if p.grad is not None} == {"cpu", "cuda"}
        assert float(norm) == pytest.approx(2 * float(nn.utils.get_total_norm(gradients_of(expected))))
        assert float(strategy.total_norm(gradients_of(module))) == pytest.approx(0.01, rel=1e-3)
    finally:
        leave()


def test_a_loss_of_parameters_outside_their_forward_is_refused() -> None:
    module, tokens = model(), torch.ones(1, 4, dtype=torch.long)
    gang = Gang()
    try:
        plan = DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS))
        strategy = FullyShardedModel(module, plan, gang, torch.device("cpu"))
        executor = NativeExecutor(strategy, optimizer_of(module), torch.device("cpu"))
        with strategy.micro(last=True):
            loss = strategy.model(tokens).square().mean()
            penalty = sum(parameter.square().sum() for parameter in module.parameters())
            with pytest.raises(ModelError, match="let that forward return the term beside its output"):
                executor.backward(loss + penalty)
    finally:
        leave()


def test_batch_norms_that_the_cpu_cannot_compute_are_refused_before_anything_is_sharded() -> None:
    def strategy(ignored: str | None) -> FullyShardedModel:
        plan = DistPlan(strategy="fsdp", shard=ShardPlan(param_dtype="bf16", ignored=ignored))
        return FullyShardedModel(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), plan, gang, torch.device("cpu")
        )

    gang = Gang()
    try:
        with pytest.raises(
            ConfigError, match=r"fsdp_config.ignored_modules=None: .* weights in bf16 .* \(1\)"
        ):
            strategy(None)
        kept = strategy("1")
        kept.model(torch.ones(4, 2, dtype=torch.bfloat16)).sum().backward()
        assert kept.module[1].weight.grad.dtype == torch.float32
    finally:
        leave()


@pytest.mark.parametrize(
    ("sums", "resets"), [("an attribute", True), ("an attribute", False), ("a property", True)]
)
def test_a_micro_batch_that_fails_leaves_no_gradients(
    sums: str, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.15 on, what FSDP calls the accumulated gradient is a read-only view of the gathered one.

    Before 2.13 FSDP does not reset itself.
    """
    if not resets:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    expected, module, tokens = model(), model(), torch.ones(1, 4, dtype=torch.long)
    gang = Gang()
    try:
        plan = DistPlan(strategy="fsdp", shard=ShardPlan(**BLOCKS))
        strategy = FullyShardedModel(module, plan, gang, torch.device("cpu"))
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        groups = [group for unit in units for group in groups_of(unit)]
        parameters: list[Any] = [parameter for group in groups for parameter in group.fsdp_params]

        class ReadOnly(type(parameters[0])):  # type: ignore[misc]
            unsharded_accumulated_grad = property(lambda self: self._unsharded_param.grad)

        def fail() -> None:
            with strategy.micro(last=False):
                strategy.model(tokens).square().mean().backward()
                for parameter in parameters if sums == "a property" else ():
                    parameter.__class__ = ReadOnly
                raise RuntimeError("out of memory")

        with strategy.micro(last=False):
            strategy.model(tokens).square().mean().backward()
        assert any(parameter._unsharded_param.grad is not None for parameter in parameters)
        with pytest.raises(RuntimeError, match="out of memory"):
            fail()
        for parameter in parameters:
            parameter.__class__ = FSDPParam
        module.zero_grad()  # what the executor does; it knows nothing of the gathered ones
        with strategy.micro(last=True):
            strategy.model(tokens).square().mean().backward()
        expected(tokens).square().mean().backward()
        for mine, theirs in zip(gradients_of(module), gradients_of(expected), strict=True):
            assert torch.equal(whole(mine), theirs)
    finally:
        leave()


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
