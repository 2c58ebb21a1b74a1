"""Clipping gradients in a loop of the user's own, and reducing those of a forward under `no_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.prepared import LoopExecutor, Prepared
from windlass.core.errors import ModelError
from windlass.transforms.ddp import Replicated
from windlass.zero.zero_executor import ZeroExecutor


def clip_norm(prepared: Prepared, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients down to a global norm of `max_norm`, and return the norm before that."""
    chosen, executors = _unscaled(prepared, parameters)
    if executors and isinstance(executors[0], ZeroExecutor):
        _check_clipped(executors[0], chosen, norm_type)
        return executors[0].clip(max_norm)
    if executors and norm_type == 2:
        return executors[0].clip(max_norm, parameters=chosen)  # type: ignore[call-arg]
    norm = torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type=norm_type)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, whole)
    return whole


def clip_values(prepared: Prepared, parameters: Any, clip_value: float) -> None:
    """Clamp gradients to [-clip_value, clip_value]."""
    chosen, executors = _unscaled(prepared, parameters)
    if any(isinstance(executor, ZeroExecutor) for executor in executors):
        raise ModelError("DeepSpeed's engine clips by the global norm only: use clip_grad_norm_")
    gradients = [p.grad for p in chosen if p.grad is not None]
    local = executors[0].strategy.local(gradients) if executors else gradients
    for gradient in local:
        gradient.clamp_(-clip_value, clip_value)


def _unscaled(prepared: Prepared, parameters: Any) -> tuple[list[Any], list[LoopExecutor]]:
    """The parameters as a list, and the executors that update them, whose gradients are divided by the loss scale."""
    chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    executors = prepared.executors_over(chosen)
    if any(executor.updates_in_backward for executor in executors):
        raise ModelError(
            "the gradients of these parameters were used and freed in the backward, so they cannot be clipped: "
            "leave the call out, or choose an optimizer that keeps them"
        )
    for executor in executors:
        executor.unscale()
    return chosen, executors


def _check_clipped(executor: ZeroExecutor, parameters: list[Any], norm_type: float) -> None:
    trained = {id(p) for p in executor.strategy.module.parameters() if p.requires_grad}
    if norm_type != 2 or not trained <= set(map(id, parameters)):
        raise ModelError(
            "DeepSpeed's engine clips all parameters of a model by their L2 norm: pass model.parameters(), and no "
            "norm_type"
        )


@contextlib.contextmanager
def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Context of a backward whose forward ran under `no_sync`: reduce its gradients.

    Only replicated models need it; for others it does nothing.
    """
    if not isinstance(model, Replicated):
        yield
        return
    found = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # The forward under `no_sync` did not prepare the reducer.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = found
