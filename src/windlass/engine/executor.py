"""The protocol of one training step: how a group becomes gradients, and how an update is applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    """The result of one update. Tensors stay on the device; the ledger reads them."""

    # Scalar fp32 or fp64, this rank's share of the loss (summed over ranks it is the update's loss)
    loss: Tensor
    norm: Tensor  # scalar, global gradient norm before clipping
    applied: bool  # False if the update was skipped (fp16 overflow, or a non-finite norm under `guard`)
    parts: dict[str, Tensor]  # named auxiliary losses, this rank's share
    overflowed: bool = False  # fp16 gradients did not fit the loss scale, which is lower now
    losses: Sequence[Tensor] = ()  # this rank's share of each micro-batch, in order; `loss` is their sum


class StepHooks:
    """What an executor calls in an update.

    Attributes:
        heard: the events of callbacks within an update that have listeners; the others are not reported.
        clip: called with the executor's way to clip, in its place, where `has_whole_gradients`; None: it clips.
    """

    heard: Collection[str] = ()
    clip: Callable[[Callable[[], Tensor]], None] | None = None

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        """Forward and backward of micro-batch `index`; returns its detached share of the update's loss."""
        raise NotImplementedError

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Called after the last micro-batch. Returns the factor that corrects the gradients, None if the weight of the
        update was known before, and named auxiliary losses, this rank's share.
        """
        return None, {}

    def event(self, name: str) -> None:
        """Called at `on_substep_end` and `on_pre_optimizer_step`, if they are heard."""

    def stepped(self, applied: bool) -> None:
        """Called after an update was applied or skipped, while its gradients exist, if `on_optimizer_step` is heard."""


class WeightAverage(Protocol):
    """An average of the trained weights: a callback's, or an optimizer's."""

    def eval(self) -> None:
        """Put the average into the parameters, if it is not there."""

    def train(self) -> None:
        """Put the weights of training back, if they are not there."""


class Executor(Protocol):
    """One model-and-optimizer set on one strategy.

    `Trainer` drives `run_step`; a loop that the user owns drives the primitives.

    Attributes:
        updates_in_backward: parameters change in the backward already, so one that fails may leave some changed.
        can_undo: an update whose backward failed leaves nothing behind once it is abandoned.
        dispatch: called when all work of an update was requested, to start it; None if the device has begun already.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    updates_in_backward: bool
    can_undo: bool
    dispatch: Callable[[], None] | None

    @property
    def model(self) -> torch.nn.Module:
        """The module that forwards run through."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of `loss`, this rank's share. The only owner of loss-scaler and reduction factors.

        Args:
            options: of `Tensor.backward`, such as `retain_graph`.
        """

    def has_own_gradients(self) -> bool:
        """True if gradients are there, and those that code computes without `backward` are what that would compute:
        it would neither scale nor reduce them, nor update parameters with them.
        """

    def has_whole_gradients(self) -> bool:
        """True if, before an update, each gradient of `Parameter.grad` is whole on this rank, so that any code may
        measure and change it.
        """

    def backward_in_loop(self, loss: Tensor, *, last: bool, discards: bool, **options: Any) -> None:
        """`backward` in a loop that the user owns, outside of `run_step`.

        Args:
            last: this is the last micro-batch of its update.
            discards: the gradients are not used.
        """

    def backward_aux(self, loss: Tensor) -> None:
        """Gradients of an auxiliary `loss` on this rank, kept until `add_aux`. `backward` may still use the graph."""

    def add_aux(self, factor: Tensor) -> None:
        """Add `factor` times the auxiliary gradients to the gradients, before the backward that reduces them."""

    def clip(self, max_norm: float | None) -> Tensor:
        """The global gradient norm before clipping; scales gradients if it exceeds `max_norm`."""

    def step(self) -> bool:
        """Apply the update. False: it was skipped."""

    def zero_grad(self) -> None: ...

    def abandon(self) -> bool:
        """Discard the gradients of an update that failed with an error. Return True if the model and the optimizer are
        unchanged.
        """

    def warm_up(self, backward: Callable[[], Tensor]) -> None:
        """Run discarded work before the first update, so that a resumed run repeats the same bits."""

    def release(self) -> None:
        """Release wrappers, and the process groups that they hold, after training."""

    def average_by(self, average: WeightAverage | None) -> None:
        """Set what averages weights, if not the optimizer. Raises ConfigError if the executor has no place for it."""

    def evaluating(self) -> AbstractContextManager[Any]: ...

    def averaged(self) -> AbstractContextManager[Any]:
        """Around a save: the weights are those that are evaluated, their average if there is one."""

    def begin(self) -> None:
        """Called before the first update."""

    def finish(self) -> None:
        """Called after the last update."""

    def run_step(
        self, update: UpdateBatch, hooks: StepHooks, *, max_norm: float | None = None, guard: bool = False
    ) -> StepResult:
        """Make one update.

        Args:
            max_norm: gradients are scaled down to this global L2 norm; None leaves them.
            guard: wait for the norm before the update, and skip the update if the norm is not finite.
        """

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...
