"""The protocol of one training step: how a group becomes gradients, and how an update is applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.types import State
from windlass.data.update_batch import UpdateBatch
from windlass.transforms.strategy import Strategy


@dataclass(slots=True)
class StepResult:
    """The result of one update. Tensors stay on the device; the ledger reads them.

    Attributes:
        loss: scalar fp32 or fp64, this rank's share of the loss (summed over ranks it is the update's loss).
        norm: scalar, global gradient norm before clipping.
        applied: False if the update was skipped (fp16 overflow, or a non-finite norm under `guard`).
        parts: named auxiliary losses, this rank's share.
        overflowed: fp16 gradients did not fit the loss scale, which is lower now.
        losses: this rank's share of each micro-batch, in order; `loss` is their sum.
    """

    loss: Tensor
    norm: Tensor
    applied: bool
    parts: dict[str, Tensor]
    overflowed: bool = False
    losses: Sequence[Tensor] = ()


class StepHooks:
    """What an executor calls in an update."""

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        """Forward and backward of micro-batch `index`; returns its detached share of the update's loss."""
        raise NotImplementedError

    def rescale(self) -> Tensor | None:
        """Factor that corrects the gradients once the true weight of the update is known; None if it was known."""
        return None

    def parts(self) -> dict[str, Tensor]:
        """Named auxiliary losses of the update, this rank's share."""
        return {}

    def event(self, name: str) -> None:
        """Called at `on_substep_end` and `on_pre_optimizer_step`."""

    def stepped(self, applied: bool) -> None:
        """Called after an update was applied or skipped, while its gradients exist: `on_optimizer_step`."""


class WeightAverage(Protocol):
    """An average of the trained weights: a callback's, or an optimizer's."""

    def eval(self) -> None:
        """Put the average into the parameters, if it is not there."""
        ...

    def train(self) -> None:
        """Put the weights of training back, if they are not there."""
        ...


class Executor(Protocol):
    """One model-and-optimizer set on one strategy.

    `Trainer` drives `run_step`; a loop that the user owns drives the primitives.

    Attributes:
        updates_in_backward: parameters change in the backward already, so one that fails may leave some changed.
        can_undo: an update whose backward failed leaves nothing behind once it is abandoned.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    updates_in_backward: bool
    can_undo: bool

    @property
    def model(self) -> torch.nn.Module:
        """The module that forwards run through."""
        ...

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around one forward and backward: gradients are reduced over ranks only in the last one."""
        ...

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of `loss`, this rank's share. The only owner of loss-scaler and reduction factors.

        Args:
            options: of `Tensor.backward`, such as `retain_graph`.
        """
        ...

    def backward_in_loop(self, loss: Tensor, *, last: bool, discards: bool, **options: Any) -> None:
        """`backward` in a loop that the user owns, outside of `run_step`.

        Args:
            last: this is the last micro-batch of its update.
            discards: the gradients are not used.
        """
        ...

    def backward_aux(self, loss: Tensor) -> None:
        """Gradients of an auxiliary `loss` on this rank, kept until `add_aux`. `backward` may still use the graph."""
        ...

    def add_aux(self, factor: Tensor) -> None:
        """Add `factor` times the auxiliary gradients to the gradients, before the backward that reduces them."""
        ...

    def clip(self, max_norm: float | None) -> Tensor:
        """The global gradient norm before clipping; scales gradients if it exceeds `max_norm`."""
        ...

    def step(self) -> bool:
        """Apply the update. False: it was skipped."""
        ...

    def zero_grad(self) -> None: ...

    def dispatch(self) -> None:
        """Called when all work of an update was requested: start it, on devices that only recorded it so far."""
        ...

    def abandon(self) -> bool:
        """Discard the gradients of an update that failed with an error. Return True if the model and the optimizer are
        unchanged.
        """
        ...

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run discarded work before the first update, so that a resumed run repeats the same bits."""
        ...

    def release(self) -> None:
        """Release wrappers, and the process groups that they hold, after training."""
        ...

    def average_by(self, averages: Sequence[WeightAverage]) -> None:
        """Set what averages weights, besides the optimizer."""
        ...

    def evaluating(self) -> AbstractContextManager[Any]: ...

    def averaged(self) -> AbstractContextManager[Any]:
        """Around a save: the weights are those that are evaluated, their average if there is one."""
        ...

    def begin(self) -> None:
        """Called before the first update."""
        ...

    def finish(self) -> None:
        """Called after the last update."""
        ...

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        """Make one update.

        Args:
            max_norm: gradients are scaled down to this global L2 norm; None leaves them.
            guard: wait for the norm before the update, and skip the update if the norm is not finite.
        """
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...
