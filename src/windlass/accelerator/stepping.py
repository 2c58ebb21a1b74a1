"""Forward, backward and update in a loop that the user owns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from windlass.accelerator.base import Core
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.terms import TermsOfUpdate
from windlass.config.plugins import AutocastKwargs
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.types import LossTerms
from windlass.dist.beacon import AFTER, beacon
from windlass.precision.autocast import COMPUTE_DTYPES
from windlass.transforms.ddp import Replicated
from windlass.transforms.strategy import Strategy

_log = get_logger(__name__)


class Stepping(Core):
    """The part of `Accelerator` that a training loop calls in every step."""

    _terms: TermsOfUpdate
    _skipped = False

    # --- which micro-batch is the last of its update ------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its update."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.num_steps = value

    @property
    def step(self) -> int:
        """Micro-batches since the last loader ended."""
        return self.gradient_state.step

    @step.setter
    def step(self, value: int) -> None:
        self.gradient_state.step = value

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around one micro-batch: gradients of `models` are reduced over processes, and optimizers step, only in the
        last one of each update. The end of a prepared loader ends an update too.
        """
        self.gradient_state.advance()
        reduce = self.sync_gradients or self.gradient_state.plugin.sync_each_batch
        self._terms.models = models
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self._micro(model, reduce))
            yield

    def _micro(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        strategy = self._prepared.strategy_of(model)
        return contextlib.nullcontext() if strategy is None else strategy.micro(last)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around a forward and its backward: gradients of `model` are not reduced over processes."""
        return self._micro(model, False)

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Around a backward whose forward ran under `no_sync`: gradients are reduced after all.

        Only replicated models need it; for others nothing happens.
        """
        if not isinstance(model, Replicated):
            yield
            return
        found = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The forward under `no_sync` left the reducer asleep.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = found

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Around a loop over data of the script's own that ends earlier on some processes than on others.

        Prepared loaders end together on all processes, so they need none of it.

        Args:
            joinables: replicated models (and optimizers) that take part.
            even_batches: False: the data may end unevenly. None takes the loader configuration's.
        """
        even = self._settings.loader.even_batches if even_batches is None else even_batches
        replicated = self._gang.size > 1 and all(not s.sharded for s in self._prepared.strategies)
        if even or not replicated:
            if not even and self._gang.size > 1:
                warn_once(
                    _log, "join_uneven_inputs has no effect on sharded models: their data must end evenly."
                )
            yield
            return
        with Join(joinables, enable=True, throw_on_early_termination=False):
            yield

    # --- backward -----------------------------------------------------------------------------------------------------

    def bind_backward(self, backward: Callable[[Any], None] | None, strategy: Strategy | None = None) -> None:
        """Say what `backward` does while a Trainer's run is under way, None when it is over; and how its model is
        spread, which stays known.
        """
        self._backward = backward
        if strategy is not None:
            self._prepared.strategies = [strategy]

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Gradients of a micro-batch's loss.

        A tensor is taken as the mean over the batch's samples, divided by the number of micro-batches of an update,
        and weighted by this process's share of the batch where the shares differ. `LossTerms(sum, weight)` are divided
        by the weight of the whole update, over all its micro-batches and processes.

        Args:
            loss: a scalar tensor, or `LossTerms`.
            kwargs: for `Tensor.backward`.

        Raises:
            ModelError: no update of the Trainer is under way; or terms that cannot be honoured.
        """
        if self._backward is not None:
            self._backward(loss)
            return
        if self._of_run:
            raise ModelError("accelerator.backward(loss) was called outside a training step of the Trainer")
        beacon().call("backward")
        if kwargs.pop("learning_rate", None) is not None:
            self.lomo_backward(loss, 0.0)
        if isinstance(loss, LossTerms):
            self._terms.backward(loss, self.gradient_state, kwargs)
        else:
            self._terms.plain(self.sync_gradients)
            self._scaled(self._share_of(loss)).backward(**kwargs)
        beacon().call(f"{AFTER}backward")

    def _share_of(self, loss: Tensor) -> Tensor:
        """This micro-batch's part of the update's loss, times the number of processes, whose mean is taken."""
        steps = self.gradient_accumulation_steps
        share = loss if steps == 1 else loss / steps
        loader = self.gradient_state.active_dataloader
        if loader is None or loader.samples_here * self._gang.size == loader.samples_everywhere:
            return share
        if loader.is_filler:  # the mean over nothing may be NaN
            return torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
        return share * (loader.samples_here * self._gang.size / loader.samples_everywhere)

    def _scaled(self, loss: Tensor) -> Any:
        return self._prepared.scaler.scale(loss)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refused: optimizers that update inside the backward are not built."""
        fix = "LOMO is not built: prepare another optimizer and call backward(loss)"
        raise ConfigError(Problem("lomo_backward", learning_rate, fix))

    # --- gradients ----------------------------------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the fp16 loss scale, once per update; clipping and stepping do it by themselves.

        Args:
            optimizer: one or several prepared optimizers; None: all of them.
        """
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self._prepared.executor_of(self._found(one)).unscale()

    def _found(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self._prepared.optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        raise ModelError(f"this {type(optimizer).__name__} was not prepared by this accelerator")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of `parameters` down to a global norm, over all processes where they are sharded.

        Returns:
            The norm before clipping: a scalar tensor, the same on every process.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        executors = self._prepared.executors_over(chosen)
        for executor in executors:
            executor.unscale()
        if executors and norm_type == 2:
            return executors[0].clip(max_norm, parameters=chosen)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in chosen if p.grad is not None], norm_type=norm_type
        )
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, whole)
        return whole

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Cut every element of the gradients of `parameters` to -clip_value..clip_value."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        executors = self._prepared.executors_over(chosen)
        for executor in executors:
            executor.unscale()
        gradients = [p.grad for p in chosen if p.grad is not None]
        local = executors[0].strategy.local(gradients) if executors else gradients
        for gradient in local:
            gradient.clamp_(-clip_value, clip_value)

    # --- updates ------------------------------------------------------------------------------------------------------

    def apply_update(
        self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None
    ) -> tuple[bool, Any]:
        """One update; what `PreparedOptimizer.step` calls."""
        if closure is None:
            return self._prepared.step(optimizer), None
        if self._prepared.scaler.active:
            raise ModelError("an optimizer that takes a closure cannot run in fp16; use bf16 or fp32")
        return True, optimizer.optimizer.step(closure)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was left out because fp16 gradients overflowed."""
        return self._skipped or any(o.step_was_skipped for o in self._prepared.optimizers)

    @optimizer_step_was_skipped.setter
    def optimizer_step_was_skipped(self, value: bool) -> None:
        self._skipped = value

    # --- precision ----------------------------------------------------------------------------------------------------

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop, for code outside a prepared model's forward.

        Args:
            autocast_handler: other options than those that the accelerator was made with.
        """
        options = autocast_handler or self._settings.handlers.autocast
        dtype = COMPUTE_DTYPES.get(self._precision.compute)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    @contextlib.contextmanager
    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> Iterator[None]:
        """Nothing happens: sequences are not split over processes (`parallelism_config.cp_size` above 1 is refused)."""
        yield
