"""Forward, backward and update of a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared import LoopExecutor, Prepared
from windlass.core.errors import ModelError
from windlass.core.logs import get_logger, warn_once
from windlass.dist.gang import Gang
from windlass.transforms.ddp import Replicated
from windlass.zero.zero_executor import ZeroExecutor

_log = get_logger(__name__)


class Stepping:
    """What a training loop calls in every step, on the prepared objects; see the methods of `Accelerator`."""

    def __init__(
        self,
        data_ranks: Gang,
        accumulation: AccumulationState,
        prepared: Prepared,
    ) -> None:
        self._data_ranks, self._accumulation, self._prepared = data_ranks, accumulation, prepared

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of one micro-batch."""
        self._accumulation.advance()
        reduce = self._accumulation.sync_gradients or self._accumulation.plugin.sync_each_batch
        self._accumulation.models = models
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self._micro(model, reduce))
            yield

    def _micro(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        strategy = self._prepared.strategy_of(model)
        return contextlib.nullcontext() if strategy is None else strategy.micro(last)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a forward and its backward: do not reduce gradients of `model` over processes."""
        return self._micro(model, False)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool) -> Iterator[None]:
        """Context of a loop over data that may end earlier on some processes, unless `even_batches`."""
        if even_batches or self._data_ranks.size == 1:
            yield
            return
        if any(s.sharded for s in self._prepared.all_strategies):
            warn_once(_log, "join_uneven_inputs has no effect on sharded models: their data must end evenly.")
            yield
            return
        with Join(joinables, enable=True, throw_on_early_termination=False):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients of one, several or (None) all optimizers by the fp16 loss scale."""
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self._prepared.executor_of(self._found(one)).unscale()

    def _found(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self._prepared.optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        raise ModelError(f"this {type(optimizer).__name__} was not prepared by this accelerator")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients down to a global norm of `max_norm`, and return the norm before that."""
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        executors = self._unscaled_executors(chosen)
        if executors and isinstance(executors[0], ZeroExecutor):
            _check_clipped(executors[0], chosen, norm_type)
            return executors[0].clip(max_norm)
        if executors and norm_type == 2:
            return executors[0].clip(max_norm, parameters=chosen)  # type: ignore[call-arg]
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in chosen if p.grad is not None], norm_type=norm_type
        )
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, whole)
        return whole

    def _unscaled_executors(self, parameters: list[Any]) -> list[LoopExecutor]:
        executors = self._prepared.executors_over(parameters)
        if any(executor.updates_in_backward for executor in executors):
            raise ModelError(
                "the gradients of these parameters were used and freed in the backward, so they cannot be clipped: "
                "leave the call out, or choose an optimizer that keeps them"
            )
        for executor in executors:
            executor.unscale()
        return executors

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to [-clip_value, clip_value]."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        executors = self._unscaled_executors(chosen)
        if any(isinstance(executor, ZeroExecutor) for executor in executors):
            raise ModelError("DeepSpeed's engine clips by the global norm only: use clip_grad_norm_")
        gradients = [p.grad for p in chosen if p.grad is not None]
        local = executors[0].strategy.local(gradients) if executors else gradients
        for gradient in local:
            gradient.clamp_(-clip_value, clip_value)


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
