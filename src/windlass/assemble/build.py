"""Make the wrapped model, the optimizer, the schedule and the executor of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.config.plan import Float8Plan, RunPlan, TransformPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.dist.gang import Gang
from windlass.engine.executor import Executor
from windlass.engine.fused import FusedExecutor
from windlass.engine.recorded import executor_for
from windlass.optim.per_parameter import PerParameterOptimizer
from windlass.optim.resolution import warn_of_lost_updates
from windlass.optim.schedule import Schedule, as_schedule
from windlass.precision.check import apply_tf32, check_precision
from windlass.precision.scaler import build_scaler
from windlass.transforms.compile import apply_compile
from windlass.transforms.float8 import apply_float8
from windlass.transforms.liger import apply_liger
from windlass.transforms.quantization_aware import apply_qat
from windlass.transforms.rebind import names_of, rebind
from windlass.transforms.recompute import apply_recompute
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy

_log = get_job_logger(__name__)

OptimizerFactory = Callable[[int], tuple[torch.optim.Optimizer | None, Any]]


@dataclass(frozen=True, slots=True)
class Built:
    """What a run trains with. Forwards run through `executor.model`."""

    executor: Executor
    schedule: Schedule


def build(
    model: nn.Module,
    create: OptimizerFactory,
    plan: RunPlan,
    device: torch.device,
    loss_ranks: Gang,
    early: torch.optim.Optimizer | None = None,
) -> Built:
    """Apply the transforms to the model, then make the optimizer and the executor. Load a checkpoint afterwards. Raises
    ConfigError if this model or device cannot do what the plan requires, or `create` made no optimizer.

    Args:
        model: the bare module, on its device; changed in place.
        create: number of updates -> optimizer and scheduler; objects of the user stay the same objects.
        early: an optimizer that was made before; it stays the same object, and gets the sharded parameters.
    """
    # DeepSpeed updates fp32 values of weights in few bits.
    check_precision(plan.precision, device, model if plan.dist.zero is None else None)
    apply_tf32(plan.precision)
    apply_transforms(model, plan.transforms, plan.precision.float8)
    if plan.dist.zero is not None:
        return _build_engine(model, create, plan, device, loss_ranks)
    # Before the parameters are replaced by sharded ones: `early` has the old ones, which are known by their names.
    names = names_of(model)
    strategy = spread(model, plan.dist, loss_ranks, device, plan.optimizer.in_backward)
    if early is not None and strategy.sharded:
        rebind(early, names, model)
    # After `spread`: an optimizer that is made now holds the parameters that are trained, sharded ones too.
    optimizer, schedule = _created(create, plan, strategy.module)
    return Built(_executor(strategy, optimizer, plan, device, loss_ranks), schedule)


def _created(
    create: OptimizerFactory, plan: RunPlan, model: nn.Module
) -> tuple[torch.optim.Optimizer, Schedule]:
    optimizer, scheduler = create(plan.duration.steps)
    if optimizer is None or scheduler is None:
        name = "optimizer" if optimizer is None else "lr_scheduler"
        fix = f"an overridden create_optimizer, create_scheduler or create_optimizer_and_scheduler must set self.{name}"
        raise ConfigError(Problem(name, None, fix))
    _check_optimizer(optimizer, model)
    warn_of_lost_updates(optimizer)
    return optimizer, as_schedule(scheduler, optimizer)


def _build_engine(
    model: nn.Module, create: OptimizerFactory, plan: RunPlan, device: torch.device, loss_ranks: Gang
) -> Built:
    """DeepSpeed's engine takes the optimizer of the whole model, and divides both."""
    from windlass.zero.zero_executor import ZeroExecutor

    assert plan.dist.zero is not None, "the caller looked"
    optimizer, schedule = _created(create, plan, model)
    return Built(ZeroExecutor(model, optimizer, plan.dist.zero, device, loss_ranks), schedule)


def _executor(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    plan: RunPlan,
    device: torch.device,
    loss_ranks: Gang,
) -> Executor:
    scaler = build_scaler(plan.precision, device)
    if plan.dist.pipeline is not None:
        from windlass.engine.pipelined import PipelineExecutor
        from windlass.transforms.pipeline import Pipeline

        assert isinstance(strategy, Pipeline)
        return PipelineExecutor(strategy, optimizer, device, plan.dist.pipeline, scaler)
    if not isinstance(optimizer, PerParameterOptimizer) or not optimizer.in_backward:
        return executor_for(device)(strategy, optimizer, device, scaler, reduce_each=plan.dist.reduce_each)
    name = type(optimizer).__name__
    if device.type == "xla":
        fix = "it updates in the backward, where PyTorch/XLA frees no memory: use adamw_torch or adafactor"
        raise ConfigError(Problem("optim", name, fix))
    if loss_ranks.over("all").size > 1 and not plan.optimizer.in_backward:
        fix = (
            "it updates in the backward, for which gradients are reduced in another way: choose it by `optim`, or pass "
            "it as optimizers=(optimizer, None)"
        )
        raise ConfigError(Problem("optimizers", name, fix))
    if plan.dist.reduce_each:
        fix = f"{name} updates in the backward, once per update; leave it out"
        raise ConfigError(
            Problem("accelerator_config.gradient_accumulation_kwargs.sync_each_batch", True, fix)
        )
    if plan.stability.max_grad_norm is None:
        _log.warning(
            "%s updates in the backward: gradients are not clipped. Set max_grad_norm to clip them, with two backwards "
            "per update",
            name,
        )
    if plan.batch.accumulation > 1:
        _log.warning(
            "%s frees each gradient in the backward, but all of them exist until the last of %d micro-batches",
            name,
            plan.batch.accumulation,
        )
    return FusedExecutor(strategy, optimizer, device, scaler)


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ConfigError if the optimizer was made for another model, so training would change nothing, or if its step
    computes the loss itself.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        fix = "its step computes the loss several times by a closure, which a run does not have: choose another one"
        raise ConfigError(Problem("optimizers", type(optimizer).__name__, fix))
    # By identity: `==` of tensors compares values, and equal weights of another model are not these.
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        fix = "it holds no parameter of this model: make it from `model.parameters()` of the model that is trained"
        raise ConfigError(Problem("optimizers", type(optimizer).__name__, fix))


def apply_transforms(model: nn.Module, plan: TransformPlan, float8: Float8Plan | None = None) -> nn.Module:
    """Transform `model` in place, in this order: kernels replace parts, layers compute in few bits, blocks are
    recomputed, compilation traces through them. Names in its state dict do not change. Wrappers for data parallelism
    follow, from the executor that owns them. Raises ConfigError if a transform cannot be applied to this model.
    `float8`: how linear layers multiply; None leaves them as they are.
    """
    if plan.liger is not None:
        apply_liger(model, plan.liger)
    apply_qat(model, plan.qat)
    if float8 is not None:
        apply_float8(model, float8)
    if plan.recompute:
        apply_recompute(model, plan.recompute_options)
    if plan.compile is not None:
        apply_compile(model, plan.compile)
    return model
