"""The executor of optimizers that update inside the backward: LOMO (Lv et al., arXiv:2306.09782) and layer-wise ones.

Each parameter is updated as soon as its gradient is complete, and the gradient is freed, so that only those of a layer
or two exist at a time. What needs all gradients first takes a second backward through the same graph: clipping by the
global norm, a check for non-finite values, and fp16. With several micro-batches in an update all gradients exist in any
case; then only the last backward updates, or the update follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.run_clock import BACKWARD
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks, StepResult
from windlass.engine.native import NativeExecutor
from windlass.optim.per_parameter import PerParameterOptimizer
from windlass.precision.scaler import Scaler
from windlass.transforms.strategy import Strategy


class Pass(Enum):
    """What happens to a gradient that is complete."""

    KEEP = "it is left where it is"
    REDUCE = "it is reduced over ranks, for an update after the backward"
    MEASURE = "its part of the norm is taken, and it is freed"
    UPDATE = "the parameter is updated, and it is freed"
    DISCARD = "it is freed"


class FusedExecutor(NativeExecutor):
    """Updates parameters inside the backward.

    Args:
        strategy: one whose gradients can be reduced one at a time (`Strategy.reduced`).
        optimizer: updates one parameter at a time.
    """

    updates_in_backward = True
    can_undo = False

    def __init__(
        self,
        strategy: Strategy,
        optimizer: PerParameterOptimizer,
        device: torch.device,
        scaler: Scaler | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(strategy, optimizer, device, scaler, parameters)
        self._per_parameter = optimizer
        self._pass = Pass.KEEP
        self._update: UpdateBatch | None = None
        self._hooks: StepHooks | None = None
        self._max_norm: float | None = None
        self._guard = False
        self._groups: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()
        self._factor: Tensor | None = None
        self._square: Tensor | None = None
        self._found: Tensor | None = None
        self._norm: Tensor | None = None
        self._handles: dict[nn.Parameter, Any] = {}
        self._hook_trained()

    def _hook_trained(self) -> None:
        """Update each parameter that is trained as soon as its gradient is complete. A frozen one takes no hook, and
        gets it if a script trains it later.
        """
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._handles:
                hook: Any = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                self._handles[parameter] = hook

    # --- the backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        _refuse(options)
        update, hooks = self._update, self._hooks
        if update is None or hooks is None:  # a discarded one
            self._run(Pass.DISCARD, loss)
        elif not self._last:
            self._run(Pass.KEEP, loss)
        else:
            rescale, _ = hooks.complete()
            waits = self._max_norm is not None or self._guard or self._scaler.active
            if rescale is None and not update.denominator:
                self._run(Pass.DISCARD, loss)
                self._norm = loss.detach().new_zeros(())
            elif len(update.batches) > 1 and waits:
                self._run(Pass.REDUCE, loss)
            elif waits:
                self._run_twice(loss, rescale)
            else:
                self._factor = rescale
                self._run(Pass.UPDATE, loss)
                self._take_norm()

    def has_own_gradients(self) -> bool:
        return False  # a raw backward has updated the parameters, or left gradients that no update uses

    def has_whole_gradients(self) -> bool:
        return False  # but one at a time

    def backward_in_loop(self, loss: Tensor, *, last: bool, discards: bool, **options: Any) -> None:
        """Update without a norm or a check."""
        _refuse(options)
        self._begin()
        self._run(Pass.DISCARD if discards else Pass.UPDATE if last else Pass.KEEP, loss)
        self._norm = None

    def _run_twice(self, loss: Tensor, rescale: Tensor | None) -> None:
        """Measure in a first backward, and update in a second one if all values are finite."""
        self._factor = rescale
        self._run(Pass.MEASURE, loss, retain_graph=True)
        norm = self._take_norm()
        if self._found is not None:
            self._overflow, self._found = self.strategy.max_over_ranks(self._found), None
        overflowed = self._overflow is not None and bool(self._overflow)
        if overflowed or (self._guard and not math.isfinite(float(norm))):
            return
        if self._max_norm is not None:
            # As in the native executor, and so in torch.nn.utils.clip_grad_norm_.
            factor = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
            self._factor = factor if rescale is None else rescale * factor
        self._run(Pass.UPDATE, loss)

    def _run(self, what: Pass, loss: Tensor, retain_graph: bool = False) -> None:
        self._pass, self._square = what, None
        # In each backward: a script may add groups, and loading a state replaces them.
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        before = self._clock.enter(BACKWARD)
        try:
            self._scaler.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            if what is not Pass.KEEP:
                # What this backward did not reach: gradients that are reduced with others, and those that only earlier
                # micro-batches have made.
                for parameter in chain(self.strategy.left_over(), self._parameters):
                    self._use(parameter)
        finally:
            self._clock.enter(before)
            self._pass = Pass.KEEP

    def _take_norm(self) -> Tensor:
        """The global norm of the gradients of the last backward."""
        nothing = torch.zeros((), device=self._parameters[0].device)
        square = nothing if self._square is None else self._square
        self._norm = self.strategy.norm_of(square)
        return self._norm

    # --- one gradient -------------------------------------------------------------------------------------------------

    def _arrived(self, parameter: nn.Parameter) -> None:
        """The gradient of this rank is complete."""
        if self._pass is Pass.KEEP:
            return
        if id(parameter) in self._updated:
            raise ModelError(
                "a parameter got a second gradient in one update, after its optimizer had changed it in the backward: "
                "pass one loss to backward, and do not use use_reentrant=True with blocks that share parameters"
            )
        for ready in self.strategy.reduced(parameter):
            self._use(ready)

    @torch.no_grad()
    def _use(self, parameter: nn.Parameter) -> None:
        """The gradient is reduced over ranks."""
        if self._pass is Pass.REDUCE or parameter.grad is None:
            return
        if self._pass is not Pass.DISCARD:
            self._scale(parameter.grad)
            # After a backward that measured, the norm is known.
            if self._pass is Pass.MEASURE or self._norm is None:
                square = self.strategy.square(parameter.grad)
                self._square = square if self._square is None else self._square + square
            if self._pass is Pass.UPDATE:
                group = self._groups.get(id(parameter))
                self._updated.add(id(parameter))
                if group is not None:
                    self._per_parameter.update(parameter, group)
        parameter.grad = None

    def _scale(self, gradient: Tensor) -> None:
        """Divide by the loss scale, and multiply by the factor of this update."""
        if self._scaler.active:
            found = self._scaler.unscale_(self.strategy.local([gradient]))
            if self._pass is Pass.MEASURE:
                self._found = found if self._found is None else torch.maximum(self._found, found)
        if self._factor is not None:
            self.strategy.multiply([gradient], self._factor)

    # --- one update ---------------------------------------------------------------------------------------------------

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        self.take_groups()  # before hooks are set
        self._begin()
        self._update, self._hooks, self._max_norm, self._guard = update, hooks, max_norm, guard
        try:
            return super().run_step(update, hooks, max_norm=max_norm, guard=guard)
        finally:
            self._update = self._hooks = None

    def _begin(self) -> None:
        self._hook_trained()
        self._updated.clear()
        self._factor = self._square = self._found = self._norm = None

    def clip(
        self,
        max_norm: float | None,
        rescale: Tensor | None = None,
        parameters: list[nn.Parameter] | None = None,
        order: float = 2.0,
    ) -> Tensor:
        """The norm that the backward measured; of gradients that it kept, as in the native executor."""
        return super().clip(max_norm, rescale, parameters, order) if self._norm is None else self._norm

    def abandon(self) -> bool:
        unchanged = super().abandon()
        return unchanged and not self._updated

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        self._begin()
        super().warm_up(backward)

    def remove_hooks(self) -> None:
        """Leave the parameters as they were before."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def release(self) -> None:
        self.remove_hooks()
        super().release()


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise ModelError if the backward is given options."""
    if options:
        raise ModelError(
            f"backward({', '.join(options)}=...) is not possible with an optimizer that updates in the backward; "
            "choose another one, or leave these arguments out"
        )
