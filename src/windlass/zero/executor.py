"""The executor of DeepSpeed's ZeRO: the engine reduces, clips and updates what it divides among ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.types import State
from windlass.core.waiting import thread_waiting
from windlass.data.group import Group
from windlass.dist.beacon import beacon
from windlass.dist.gang import Gang
from windlass.engine.executor import StepHooks, StepRequest, StepResult
from windlass.zero.library import Engine
from windlass.zero.optimizer import ZeroOptimizer
from windlass.zero.strategy import ZeroModel

_SUMMED = (
    "LossTerms(aux=...) under gradient accumulation needs separate gradients, which ZeRO does not have: set "
)


class ZeroExecutor:
    """Implements `engine.executor.Executor`.

    Every backward reduces its gradients, and the norm is known only in the update, which clips.

    Args:
        module: on its device; the engine changes it in place.
        optimizer: the user's; an optimizer whose update of an element depends on that element alone.
        config: of the engine, complete.
    """

    updates_in_backward = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        device: torch.device,
        gang: Gang,
    ) -> None:
        own = ZeroOptimizer(optimizer)
        self._engine = Engine(module, own, config, device, gang)
        own.use_places(self._engine.places())
        self.optimizer: torch.optim.Optimizer = own
        self._own, self._device = own, device
        self.strategy = ZeroModel(module, self._engine, gang)
        self._max_norm: float | None = None
        self._factor = 1.0
        self._norm = torch.zeros((), device=device)
        self._beacon, self._waiting = beacon(), thread_waiting()

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    # --- primitives -------------------------------------------------------------------------------------------------

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        unknown = sorted(options.keys() - {"retain_graph"})
        if unknown:
            raise ModelError(
                f"backward({', '.join(unknown)}=...) is not possible under DeepSpeed; leave these arguments out"
            )
        self._engine.backward(loss, bool(options.get("retain_graph")))

    def backward_aux(self, loss: Tensor) -> None:
        if loss.requires_grad:
            raise ModelError(
                f"{_SUMMED}gradient_accumulation_steps=1, or put the auxiliary terms into the sum"
            )

    def add_aux(self, factor: Tensor) -> None:
        """No auxiliary gradients exist."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip in the next `step`. The norm is that of the last update."""
        self._max_norm = max_norm
        return self._norm

    def step(self) -> bool:
        norm, finite = self._engine.step(self._max_norm, self._factor)
        self._norm = norm.to(self._device)
        applied = finite and not self._own.skips
        self._max_norm, self._factor, self._own.skips = None, 1.0, False
        self._waiting.look()
        return applied

    def zero_grad(self) -> None:
        """The engine frees gradients in its step."""

    def abandon(self) -> bool:
        """The engine cannot take back a half-finished backward or update."""
        return False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        with self.strategy.buffers_of_first_rank():
            yield

    def averaged(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def begin(self) -> None:
        """The optimizer has no modes."""

    def finish(self) -> None:
        """The optimizer has no modes."""

    # --- one update -------------------------------------------------------------------------------------------------

    def run_step(self, group: Group, request: StepRequest, hooks: StepHooks) -> StepResult:
        if not self.strategy.module.training:  # after an evaluation, or a callback that sampled from it
            self.model.train()
        losses: list[Tensor] = []
        last = len(group.batches) - 1
        self._beacon.call("forward and backward")
        for index, batch in enumerate(group.batches):
            losses.append(hooks.micro_step(batch, index, request))
            if index != last:
                hooks.event("on_substep_end")
        self._beacon.call("norm and update")
        loss, rescale = sum(losses[1:], losses[0]), hooks.rescale(request)
        if rescale is not None:
            loss, self._factor = loss * rescale, float(rescale)
        self._max_norm = request.max_norm
        self._own.skips = request.empty and rescale is None
        hooks.event("on_pre_optimizer_step")
        applied = self.step()
        hooks.event("on_optimizer_step")
        if applied:
            hooks.advance_schedule()
        return StepResult(loss, self._norm, applied, hooks.parts(), False, losses)

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        self.strategy.warm_up(backward)

    def release(self) -> None:
        self.strategy.release()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {"scaler": {}}

    def load_state_dict(self, state: State) -> None:
        """Nothing to do: there is no loss scale."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ZeRO may join parameters for this optimizer: its update of an element reads that element alone."""
    return type(optimizer) in _ELEMENTWISE


_ELEMENTWISE = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SGD,
    torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Adadelta,
)  # fmt: skip
