"""The native executor: one model on any strategy, with the optimizer stepping after the backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from windlass.core import host
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.run_clock import BACKWARD, COMPUTE, UPDATE, run_clock
from windlass.core.tensors import laid_out_as
from windlass.core.types import State
from windlass.core.waiting import thread_waiting
from windlass.core.world import world_from_environment
from windlass.data.update_batch import UpdateBatch
from windlass.dist.beacon import beacon
from windlass.dist.sharded import is_sharded
from windlass.engine.executor import StepHooks, StepResult, WeightAverage
from windlass.precision.scaler import Scaler, UnitScaler
from windlass.transforms.rebind import update_singly
from windlass.transforms.strategy import Strategy, unfrozen

_OF_PARTS = (
    "the loss holds a term of parameters that are divided over ranks. A sharded layer (FSDP) has its whole "
    "parameters in its own forward alone: let that forward return the term beside its output, or use weight_decay for "
    "a sum of squares (the section Sharded of docs/distributed.md)"
)


class NativeExecutor:
    """Accumulates, clips, guards and steps, on any strategy.

    Args:
        strategy: how the model is spread over ranks.
        optimizer: any torch optimizer over the model's parameters.
        scaler: the fp16 loss scaler; by default one that does nothing.
        parameters: the parameters that are clipped and cleared; by default every parameter of the model that gets
            gradients, and all others of the optimizer.
        reduce_each: reduce gradients over ranks after each micro-batch, and not once per update.
    """

    updates_in_backward = False
    can_undo = True
    dispatch: Callable[[], None] | None = None

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        scaler: Scaler | None = None,
        parameters: list[nn.Parameter] | None = None,
        reduce_each: bool = False,
    ) -> None:
        self.strategy, self._reduce_each = strategy, reduce_each
        # Then no backward waits for other ranks, and the clock of the run need not tell apart where time goes.
        self._alone = world_from_environment().size == 1
        self.optimizer = optimizer
        update_singly(optimizer)
        self._scaler = scaler or UnitScaler(device)
        self._parameters = (
            _trained_parameters(strategy.module, optimizer) if parameters is None else parameters
        )
        self._group_count = len(optimizer.param_groups)
        self._aux_gradients: dict[nn.Parameter, Tensor] = {}
        self._overflow: Tensor | None = None
        self._skip = False
        self._last = True  # the micro-batch under way is the last one of its update
        self._overflowed = self._applying = False
        self._beacon, self._waiting, self._clock = beacon(), thread_waiting(), run_clock()
        self._average: WeightAverage | None = None
        self.average_by(None)
        self._averaged = 0  # how many `averaged` are open

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    # --- primitives -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of `loss`: this rank's share times the number of ranks, because ranks are averaged.

        Raises ModelError if code outside the model made it from parameters of which this rank has a part.
        """
        if self.strategy.sharded and is_sharded(loss):
            # PyTorch mixes it with the other losses, and fails in the backward, at an operation of its own.
            raise ModelError(_OF_PARTS)
        scaled = self._scaler.scale(loss) if self._scaler.active else loss
        if self._alone:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
            return
        before = self._clock.enter(BACKWARD)
        try:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        finally:
            self._clock.enter(before)

    def has_own_gradients(self) -> bool:
        return self._alone and not self._scaler.active and bool(self._gradients())

    def has_whole_gradients(self) -> bool:
        return not (self.strategy.sharded or any(map(is_sharded, self._parameters)))

    def backward_in_loop(self, loss: Tensor, *, last: bool, discards: bool, **options: Any) -> None:
        self.backward(loss, **options)

    def backward_aux(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            return
        if self.strategy.sharded:
            raise ModelError(
                "LossTerms(aux=...) under gradient accumulation needs separate gradients, which a sharded model "
                "does not have: set gradient_accumulation_steps=1, or put the auxiliary terms into the sum"
            )
        trained = [p for p in self._parameters if p.requires_grad]
        # Not `backward`: its hooks would reduce these gradients over ranks, and add them to the others.
        found = torch.autograd.grad(self._scaler.scale(loss), trained, retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                earlier = self._aux_gradients.get(parameter)
                self._aux_gradients[parameter] = gradient if earlier is None else earlier + gradient

    def add_aux(self, factor: Tensor) -> None:
        for parameter, gradient in self._aux_gradients.items():
            # Not in place: autograd may have returned one tensor for several parameters.
            wide = torch.promote_types(gradient.dtype, torch.float32)  # as in `Strategy.multiply`
            product = (gradient.to(wide) * factor.to(gradient.device, wide)).to(gradient.dtype)
            scaled = laid_out_as(product, parameter)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        self._aux_gradients = {}

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, once per update; `clip` does it too."""
        if self._scaler.active and self._overflow is None:
            found = self._scaler.unscale_(self.strategy.local(self._gradients()))
            # A copy: several executors may share a scaler, which has one flag.
            self._overflow = self.strategy.max_over_ranks(found.clone())

    def scale_again(self) -> None:
        """Multiply gradients that were unscaled by the loss scale again: a backward is about to add scaled ones."""
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            self.strategy.multiply(self._gradients(), self._scaler.scale(torch.ones_like(overflow)))

    def follow_scale(self, factor: Tensor) -> None:
        """Called if the loss scale was multiplied by `factor` while there are gradients of the old one."""
        if self._overflow is None:
            self.strategy.multiply(self._gradients(), factor)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def clip(
        self,
        max_norm: float | None,
        rescale: Tensor | None = None,
        parameters: list[nn.Parameter] | None = None,
        order: float = 2.0,
    ) -> Tensor:
        """Global norm of the gradients before clipping (after unscaling, after `rescale`).

        Args:
            parameters: clip these instead of all that are trained here, for loops of the user's own.
            order: of the norm; 2 is L2, infinity the largest magnitude.
        """
        if self._scaler.active:
            self.unscale()
        chosen = self._parameters if parameters is None else parameters
        gradients = [p.grad for p in chosen if p.grad is not None]
        if rescale is not None:
            self.strategy.multiply(gradients, rescale)
        norms = self.strategy
        norm = norms.total_norm(gradients) if order == 2 else norms.norm_of_order(gradients, order)
        # 1e-6 as in the factor below, so that both ways decide alike.
        if max_norm is None or (norm.is_cpu and host.read(norm) + 1e-6 <= max_norm):
            return norm  # a factor of one; on an accelerator the host does not wait for the norm to know
        # The same formula as torch.nn.utils.clip_grad_norm_, so the same bits.
        self.strategy.multiply(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def step(self) -> bool:
        if self.strategy.reduces:
            self.strategy.check_used()
        skip, self._skip = self._skip, False
        overflow, self._overflow = self._overflow, None
        self._overflowed = overflow is not None and self._scaler.overflowed(overflow)
        if overflow is not None:
            self._scaler.update(overflow)
        if skip or self._overflowed:
            return False
        self._applying = True  # an error in it leaves some weights changed; see `abandon`
        self.optimizer.step()
        self._applying = False
        if self._clock.since >= self._waiting.due:  # read in this update, by both clocks alike
            self._waiting.look()
        return True

    def zero_grad(self) -> None:
        self._aux_gradients = {}
        # Freed, not filled with zeros: a parameter that a later forward does not use has no gradient then, and an
        # optimizer leaves it alone.
        for parameter in self._parameters:
            parameter.grad = None

    def abandon(self) -> bool:
        """False if the optimizer stopped half way: it has changed some weights and not others."""
        self.zero_grad()
        self._overflow, self._skip = None, False
        applying, self._applying = self._applying, False
        return not applying

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode: of the model until `run_step`, of averaged weights here. Collective."""
        self.model.eval()
        with self.averaged(), self.strategy.buffers_of_first_rank():
            yield

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the weights that are evaluated and saved: their average, if there is one."""
        self._switch("eval")
        self._averaged += 1
        try:
            yield
        finally:
            self._averaged -= 1
            if not self._averaged:
                self._switch("train")

    def average_by(self, average: WeightAverage | None) -> None:
        """Set what averages weights, if not an optimizer that has modes. Raises ConfigError if both would."""
        optimizer: Any = self.optimizer
        averages_itself = callable(getattr(optimizer, "eval", None))
        if averages_itself and average is not None:
            fix = (
                f"{type(optimizer).__name__} averages the weights itself, and a run evaluates and saves one average of "
                "them: leave one of the two out"
            )
            raise ConfigError(Problem("callbacks", type(average).__name__, fix))
        self._average = optimizer if averages_itself else average

    def _switch(self, mode: Literal["train", "eval"]) -> None:
        if self._average is not None:
            getattr(self._average, mode)()

    def begin(self) -> None:
        """Called before the first update, after a checkpoint was loaded: it holds the averaged weights."""
        self._averaged = 0
        self._switch("train")

    def finish(self) -> None:
        """Called after the last update: leave the averaged weights in the model."""
        self._switch("eval")
        self._averaged += 1  # a save that follows does not take them out

    # --- one update -------------------------------------------------------------------------------------------------

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        """Gradients of every micro-batch, one norm, one update."""
        if len(self.optimizer.param_groups) != self._group_count:  # without a call in the usual case
            self.take_groups()
        if not self.strategy.module.training:  # after an evaluation, or a callback that sampled from it
            self.model.train()
        loss: Tensor | None = None
        losses: list[Tensor] = []
        last = len(update.batches) - 1
        for index in range(last + 1):
            self._last = index == last
            with self.strategy.micro(self._last or self._reduce_each):
                share = hooks.micro_step(update, index)
            losses.append(share)
            loss = share if loss is None else loss + share
            if index != last and "on_substep_end" in hooks.heard:
                hooks.event("on_substep_end")
        assert loss is not None, "an update has at least one micro-batch"
        if self.strategy.reduces:
            self.strategy.check_reached()
        self._beacon.call("norm and update")
        self._clock.enter(UPDATE)
        rescale, parts = hooks.complete()
        if rescale is not None:
            loss = loss * rescale
        norm = self.clip(max_norm if hooks.clip is None else None, rescale)
        if hooks.clip is not None and max_norm is not None:
            # Measured before: what the run reports and decides by is the same on all ranks.
            hooks.clip(partial(self.clip, max_norm))
        self._skip = rescale is None and not update.denominator
        if guard:
            self._clock.enter(COMPUTE)  # the host waits for the device
            # The norm is the same on all ranks, so all decide alike without an exchange. The policy reads only it.
            self._skip = self._skip or not math.isfinite(float(norm))
            self._clock.enter(UPDATE)
        if "on_pre_optimizer_step" in hooks.heard:
            hooks.event("on_pre_optimizer_step")
        applied = self.step()
        if "on_optimizer_step" in hooks.heard:
            hooks.stepped(applied)
        self.zero_grad()
        self._clock.enter(COMPUTE)
        return StepResult(loss, norm, applied, parts, self._overflowed, losses)

    def take_groups(self) -> None:
        """Train the parameters of groups that were added to the optimizer since the last update."""
        if len(self.optimizer.param_groups) == self._group_count:
            return
        self._group_count, known = len(self.optimizer.param_groups), {id(p) for p in self._parameters}
        for parameter in _trained_parameters(self.strategy.module, self.optimizer):
            if id(parameter) not in known:
                reduced = self.strategy.reduces and parameter.requires_grad
                if reduced and not self.strategy.averages(parameter):
                    raise unfrozen()
                parameter.grad = None  # of updates that did not train it
                self._parameters.append(parameter)

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        self.strategy.warm_up(backward)

    def release(self) -> None:
        self.strategy.release()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._scaler.load_state_dict(state["scaler"])


def _trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Every parameter of the model that gets gradients, and all others of the optimizer."""
    found = {id(p): p for p in model.parameters() if p.requires_grad}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.setdefault(id(parameter), parameter)
    return list(found.values())
