"""A wrapper of a user's learning-rate schedule, for loops with accumulation, skipped updates and several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.core.errors import RankMismatchError
from windlass.dist.differences import differences
from windlass.dist.gang import Gang
from windlass.optim.schedule import load_data, state_as_data

Unit = Literal["loader_batch", "optimizer_step", "call"]


class PreparedSchedule:
    """A schedule that advances with the updates of its optimizers.

    Args:
        scheduler: the user's schedule.
        optimizers: those that were prepared before it; see `follow`.
        unit: what it counts. "loader_batch": batches of the unprepared loader; each update advances it by the number of
            batches that the update covers. "optimizer_step": updates that were applied, for any number of processes
            and calls of `step`. "call": calls of `step`.
        adjust: count micro-batches in the schedule's `_step_count`, which only its warnings read.
        all_ranks: have one learning rate.

    Attributes:
        optimizers: the optimizers whose updates it follows.
    """

    _is_accelerate_prepared = True  # scripts look for it

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: AccumulationState,
        unit: Unit,
        adjust: bool,
        all_ranks: Gang,
    ) -> None:
        self.scheduler, self._all_ranks = scheduler, all_ranks
        self.optimizers: list[PreparedOptimizer] = []
        self._followed = 0  # their updates that the schedule has counted
        self.unit: Unit = unit
        self._accumulation = accumulation
        # It depends on a metric, not on data.
        self._counts_batches = not isinstance(scheduler, ReduceLROnPlateau)
        # Schedules that do not count their steps have no such warnings (`ReduceLROnPlateau`).
        self._adjust = adjust and hasattr(scheduler, "_step_count")
        self.follow(optimizers)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet while a copy is made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def follow(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        """Follow the optimizer that the schedule was built on, or all of `optimizers` if it is not among them. Called
        again for each optimizer that is prepared later, which may be that one.
        """
        built_on = getattr(self.scheduler, "optimizer", None)
        if isinstance(built_on, PreparedOptimizer):  # perhaps by another accelerator before
            built_on = built_on.optimizer
        found = [o for o in optimizers if built_on is o.optimizer] or list(optimizers)
        if found != self.optimizers:
            self.optimizers = found
            self._followed = self._updates()

    def _updates(self) -> int:
        return max((optimizer.updates for optimizer in self.optimizers), default=0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by the unit of the last update; do nothing between updates, or if the update was skipped. Collective
        for a schedule that depends on a metric: raises RankMismatchError if the processes have different ones.
        """
        if not self._counts_batches and (self.unit == "call" or self._accumulation.sync_gradients):
            self._compare_metric(*args, **kwargs)
        if self.unit == "call":
            self.scheduler.step(*args, **kwargs)
        elif self.unit == "optimizer_step":
            done, self._followed = self._followed, self._updates()
            for _ in range(done, self._followed):
                self.scheduler.step(*args, **kwargs)
        elif not self._accumulation.sync_gradients:
            if self._adjust:
                self.scheduler._step_count += 1
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._accumulation.batches_of_update() if self._counts_batches else 1):
                self._advance(*args, **kwargs)

    def _compare_metric(self, metrics: Any, *_: Any, **__: Any) -> None:
        """With a metric of its own each process would soon have another learning rate, and another model."""
        if self._all_ranks.size == 1:
            return
        everywhere = [repr(value) for value in self._all_ranks.gather_objects(float(metrics))]
        if len(set(everywhere)) > 1:
            raise RankMismatchError(
                differences([{"metrics": value} for value in everywhere], self._all_ranks.members),
                f"{type(self.scheduler).__name__}.step was given different metrics on the processes",
                "Reduce the metric first: accelerator.reduce(metric, 'mean'), or compute it from what "
                "gather_for_metrics returns.",
            )

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        # The data may have more batches than the schedule was built for; it must not run past its end.
        end = getattr(self.scheduler, "total_steps", None)
        # Not by its `_step_count`, in which micro-batches are counted too.
        if end is None or self.scheduler.last_epoch < end:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the next update, one per group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> Any:
        """`get_lr` of the user's schedule, which torch means for use within `step` alone; see `get_last_lr`."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's schedule as data (`optim/schedule.py`)."""
        return state_as_data(self.scheduler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the `state_dict` of a schedule of the same kind."""
        load_data(self.scheduler, state_dict)
        self._followed = self._updates()
