"""The registry of strategies: the module for each name in a plan."""

from __future__ import annotations

import torch
from torch import nn

from windlass.config.plan import DistPlan
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded
from windlass.transforms.alone import Alone
from windlass.transforms.buffers import check_sparse
from windlass.transforms.few_bits import keep_trainable
from windlass.transforms.strategy import Strategy, embedding_problems


def spread(
    module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device, in_backward: bool = False
) -> Strategy:
    """Distribute `module` over the ranks that reduce gradients together, by the plan; divide the sequences that it gets
    among the ranks of a context, if there are several, and balance experts that are divided over all ranks. Collective.

    Args:
        module: on `device` already, unless it is to be sharded.
        in_backward: the optimizer updates in the backward.

    Raises:
        ConfigError: the plan cannot be applied to this module or world.
        ModelError: no gradient passes through its layers of few bits.
    """
    keep_trainable(module)
    strategy = _spread(module, plan, loss_ranks, device, in_backward)
    context_ranks = loss_ranks.over("context")
    try:
        if (plan.expert > 1 or context_ranks.size > 1) and plan.pipeline is None:
            from windlass.transforms.whole_balance import WholeBalance

            balanced = WholeBalance(module, loss_ranks, plan.expert > 1, lambda: strategy.filling)
            balanced.attach()
            strategy.at_release.append(balanced.release)
        if context_ranks.size > 1:
            from windlass.transforms.context import DividedForwards

            divided = DividedForwards(module, context_ranks, strategy.unit_dtype)
            strategy.at_release.append(divided.release)
    except BaseException:
        # What is attached to the module by then would stay on it, and be in the way of its next run.
        strategy.release()
        raise
    return strategy


def _spread(
    module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device, in_backward: bool
) -> Strategy:
    if device.type == "xla":
        # One process has all devices there, and the compiler divides the work among them.
        from windlass.transforms.spmd import SplitOverDevices

        return SplitOverDevices(module, plan.shard if plan.strategy == "fsdp" else None)
    # Before anything is divided: a module stays as it was divided, also after an error.
    stages = 1 if plan.pipeline is None else plan.pipeline.size
    divided = plan.strategy == "fsdp" or max(plan.tensor, plan.expert, stages) > 1
    if divided or loss_ranks.size > 1:
        refuse(embedding_problems(module, divided))
    for field, size in (("tp_size", plan.tensor), ("ep_size", plan.expert), ("pp_size", stages)):
        if in_backward and size > 1:
            fix = "is not built for optimizers that update in the backward: use adamw_torch, or set it to 1"
            raise ConfigError(Problem(field, size, fix))
    if any(map(is_sharded, module.parameters())):
        _check_divided(module, plan)
    if plan.pipeline is not None:
        from windlass.transforms.pipeline import Pipeline, StageCopies

        def spread_stage() -> Strategy:
            return _in_parts(module, plan, loss_ranks, device) or StageCopies(module, loss_ranks)

        return Pipeline(module, plan.pipeline, loss_ranks, device, spread_stage, plan.expert > 1)
    if (parts := _in_parts(module, plan, loss_ranks, device)) is not None:
        return parts
    if loss_ranks.size == 1:
        return Alone(module)
    check_sparse(module, loss_ranks)
    if not loss_ranks.exists:
        from windlass.transforms.imagined_replicas import ImaginedReplicas

        return ImaginedReplicas(module, plan, loss_ranks)
    if in_backward:
        from windlass.transforms.replicas import Replicas

        return Replicas(module, plan, loss_ranks)
    from windlass.transforms.ddp import DataParallel

    return DataParallel(module, plan, loss_ranks)


def _in_parts(module: nn.Module, plan: DistPlan, loss_ranks: Gang, device: torch.device) -> Strategy | None:
    """The strategy whose ranks have parts of the parameters of a model, or of a stage of one; None if each has all."""
    if plan.strategy == "fsdp":
        from windlass.transforms.fsdp import FullyShardedModel

        return FullyShardedModel(module, plan, loss_ranks, device)
    if plan.tensor > 1:
        from windlass.transforms.tensor_parallel import TensorParallel

        return TensorParallel(module, loss_ranks, device, plan.tensor_positions)
    if plan.expert > 1:
        from windlass.transforms.expert_parallel import replicated

        return replicated(module, plan, loss_ranks, device)
    return None


def _check_divided(module: nn.Module, plan: DistPlan) -> None:
    """Raise ConfigError for a model whose weights are divided already, unless that was done here, as the plan says."""
    from torch.distributed.fsdp import FSDPModule

    from windlass.transforms.expert_layers import layers_of
    from windlass.transforms.tensor_layers import is_divided

    name = type(module).__name__
    ways = {
        "tp_size above 1": (is_divided(module), plan.tensor > 1),
        "ep_size above 1": (bool(layers_of(module)), plan.expert > 1),
        "fsdp=True": (
            any(isinstance(part, FSDPModule) for part in module.modules()),
            plan.strategy == "fsdp",
        ),
    }
    was = " and ".join(way for way, (before, _) in ways.items() if before)
    if was and any(before != now for before, now in ways.values()):
        raise ConfigError(
            Problem("model", name, f"was divided with {was} and stays so; set that, or build it again")
        )
    if not was:
        fix = (
            "its weights are divided among the processes by tensor parallelism (a tp_plan of transformers, or "
            "parallelize_module), which is not trained here; load it without tp_plan and tp_size, and set fsdp=True to "
            "divide it"
        )
        raise ConfigError(Problem("model", name, fix))
