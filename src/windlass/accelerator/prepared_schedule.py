"""A thin wrapper of a user's learning-rate schedule, for loops with accumulation, skipped updates and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.optimizer import PreparedOptimizer

Unit = Literal["loader_batch", "optimizer_step", "call"]


class PreparedSchedule:
    """A schedule that advances with the updates of its optimizers.

    Args:
        scheduler: the user's own; it keeps its identity.
        optimizers: those whose updates it follows.
        unit: what it counts. "loader_batch": batches of the unprepared loader, so every update advances it by the
            number of those that it covers. "optimizer_step": updates that were applied, whatever the number
            of processes and however often `step` is called. "call": every call of `step`.
        adjust: keep the schedule's own count of calls in micro-batches, which only its warnings read.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: AccumulationState,
        unit: Unit,
        adjust: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.unit: Unit = unit
        self._accumulation = accumulation
        # It follows a metric, not data.
        self._counts_batches = not isinstance(scheduler, ReduceLROnPlateau)
        self._adjust = adjust
        self._followed = self._updates()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _updates(self) -> int:
        return max((optimizer.updates for optimizer in self.optimizers), default=0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by the unit of the last update; do nothing between updates, or if the update was skipped."""
        if self.unit == "call":
            self.scheduler.step(*args, **kwargs)
        elif self.unit == "optimizer_step":
            self._follow(*args, **kwargs)
        elif not self._accumulation.sync_gradients:
            if self._adjust:
                self.scheduler._step_count += 1
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._accumulation.batches_of_update() if self._counts_batches else 1):
                self._advance(*args, **kwargs)

    def _follow(self, *args: Any, **kwargs: Any) -> None:
        done, self._followed = self._followed, self._updates()
        for _ in range(done, self._followed):
            self.scheduler.step(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        # Data of the script's own may hold more than its schedule was built for, which must not run past its end.
        end = getattr(self.scheduler, "total_steps", None)
        if end is None or self.scheduler._step_count <= end:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the next update, one for each group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> Any:
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)
        self._followed = self._updates()
