"""Requests to end a run early: Ctrl-C, and a scheduler that wants the machine back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from windlass.config.plan import PreemptionPlan
from windlass.core.errors import EXIT_PREEMPTED
from windlass.core.job_signals import surviving_hangup
from windlass.core.logs import get_job_logger
from windlass.trainer.interrupt import Deadline, say, stopping_on_interrupt, told_by_signals
from windlass.trainer.session import Session

logger = get_job_logger(__name__)


class WaitBrokenOff(BaseException):
    """The process was told to leave while it waited for data."""


class Interruptible(Protocol):
    """What a signal handler asks a run."""

    @property
    def waits_for_data(self) -> bool:
        """Whether the run waits for data, so that nothing is lost if it leaves at once."""
        ...

    @property
    def newest_checkpoint(self) -> Path | None:
        """The last complete checkpoint."""
        ...


class Interruption:
    """What one run was told from outside, by signals to this process and by other ranks.

    Attributes:
        stop_requested: Ctrl-C was pressed here; all ranks learn of it with their data.
        preemption_requested: a scheduler's signal arrived here.
        preempted: all ranks know that one of them was told to leave.
        stopped: all ranks know of a Ctrl-C: the run ends with this update, and is saved at the next point between two
            updates.
        epoch_goes_on: the run was stopped so that the run that resumes it ends the epoch, with its events.
    """

    def __init__(self, session: Session, plan: PreemptionPlan) -> None:
        self._gang, self._is_main, self._plan = session.gang, session.world.is_main, plan
        self.stop_requested = self.preemption_requested = self.preempted = False
        self.stopped = self.epoch_goes_on = False

    @contextlib.contextmanager
    def listening(self, run: Callable[[], Interruptible | None]) -> Iterator[None]:
        """Within the body a signal of `preemption_signals` ends the run in an orderly way.

        Args:
            run: the run, once it is there.
        """

        def last_words() -> str:
            under_way = run()
            newest = None if under_way is None else under_way.newest_checkpoint
            return (
                f"not saved within preemption_deadline={self._plan.deadline_text}: exiting; last complete "
                f"checkpoint: {newest or 'none of this run'}"
            )

        deadline = Deadline(self._plan.deadline, EXIT_PREEMPTED, last_words)

        def tell(name: str) -> None:
            self.preemption_requested = True
            if self._is_main:
                say(f"{name}: finishing this update, saving, and leaving with exit code {EXIT_PREEMPTED}")
            deadline.start()
            under_way = run()
            if self._gang.size == 1 and under_way is not None and under_way.waits_for_data:
                raise WaitBrokenOff

        try:
            with told_by_signals(self._plan.signals, tell), surviving_hangup():
                yield
        finally:
            deadline.cancel()

    def taking_ctrl_c(self, stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Within the body the first Ctrl-C requests a stop, the second raises KeyboardInterrupt.

        Args:
            stop: ends the run with this update. Called at once in a world of one; several ranks must end with the same
                update, so they learn of the request with a coming one.
        """

        def interrupted() -> None:
            logger.warning(
                "interrupted: finishing this update, then saving; train(resume_from_checkpoint=True) goes on from "
                "there. Press Ctrl-C again to stop at once"
            )
            if self._gang.size > 1:
                self.stop_requested = True
            else:
                stop()

        return stopping_on_interrupt(interrupted)

    def stop(self) -> None:
        """All ranks end with this update."""
        self.stopped = self.epoch_goes_on = True

    def agree_preemption(self, told: float) -> None:
        """Take note of how many ranks were told to leave, by the last exchange."""
        # One process need not wait for what it told itself with the data of this update.
        self.preempted = told > 0 or (self._gang.size == 1 and self.preemption_requested)

    def is_preempted(self) -> bool:
        """Ask all ranks whether one was told to leave. Collective."""
        return not self._gang.vote(not self.preemption_requested)

    def saved(self) -> None:
        """What a stop asked to save was saved."""
        self.stopped = False
