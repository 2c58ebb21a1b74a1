"""Requests to end a run early: Ctrl-C, and a scheduler that wants the machine back.

Signals end a run between two updates, never inside one, so that a saved run can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windlass.config.plan import PreemptionPlan
from windlass.core.errors import EXIT_PREEMPTED
from windlass.core.job_signals import handling, surviving_hangup
from windlass.core.logs import get_job_logger
from windlass.core.terminal import write_at_once
from windlass.trainer.session import Session

logger = get_job_logger(__name__)


class WaitBrokenOff(BaseException):
    """A scheduler's signal or Ctrl-C arrived while the only process of a run waited for data.

    Not an Exception: it is raised in whatever reads the data, which may handle those.
    """


class Interruptible:
    """What a signal handler calls of a run."""

    @property
    def waits_for_data(self) -> bool:
        """True while nothing would be lost if the process exited."""
        raise NotImplementedError

    @property
    def newest_checkpoint(self) -> Path | None:
        """The last complete checkpoint; None if the run made none."""
        raise NotImplementedError

    def end_waits(self) -> None:
        """End waits for uploads."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the run with this update, and save."""
        raise NotImplementedError


class Interruption:
    """The requests of one run, from signals to this process and from other ranks.

    Attributes:
        stop_requested: Ctrl-C was pressed here; the other ranks get the request with their data.
        preemption_requested: a scheduler's signal arrived here.
        preempted: all ranks know that one of them got a scheduler's signal; so the run saves and exits between two
            updates.
        stopped: all ranks know of a Ctrl-C: the run ends with this update, and is saved at the next point between two
            updates.
        epoch_goes_on: the run was stopped so that the run that resumes it ends the epoch, with its events.
    """

    def __init__(self, session: Session, plan: PreemptionPlan) -> None:
        self._all_ranks, self._is_main, self._plan = session.all_ranks, session.world.is_main, plan
        self.stop_requested = self.preemption_requested = self.preempted = False
        self.stopped = self.epoch_goes_on = False

    @contextlib.contextmanager
    def listening(self, run: Callable[[], Interruptible | None]) -> Iterator[None]:
        """Within the body, the first signal of `preemption_signals` requests an orderly end of `run()`."""

        def exit_unsaved() -> None:
            current = run()
            newest = None if current is None else current.newest_checkpoint
            write_at_once(
                f"windlass: not saved within preemption_deadline={self._plan.deadline_text}: exiting; last complete "
                f"checkpoint: {newest or 'none of this run'}"
            )
            # `sys.exit` would end this thread alone, and cleanup may wait for what has not ended in time.
            os._exit(EXIT_PREEMPTED)

        deadline = threading.Timer(self._plan.deadline or 0.0, exit_unsaved)
        deadline.daemon = True  # a run that ends before the deadline does not wait for it

        def preempt(number: int) -> None:
            if self.preemption_requested:
                return
            self.preemption_requested = True
            # One process need not wait until its own request comes back with the data of an update.
            self.preempted = self._all_ranks.size == 1
            if self._is_main:
                name = signal.Signals(number).name
                write_at_once(
                    f"windlass: {name}: finishing this update, saving, and leaving with exit code {EXIT_PREEMPTED}"
                )
            if self._plan.deadline is not None:
                deadline.start()
            current = run()
            if current is not None:
                current.end_waits()
            if self._all_ranks.size == 1 and current is not None and current.waits_for_data:
                raise WaitBrokenOff

        with contextlib.ExitStack() as stack:
            stack.callback(deadline.cancel)
            for number in (getattr(signal, name) for name in self._plan.signals if hasattr(signal, name)):
                if _is_free(number, signal.SIG_DFL):
                    stack.enter_context(handling(number, preempt))
            stack.enter_context(surviving_hangup())
            yield

    @contextlib.contextmanager
    def taking_ctrl_c(self, run: Interruptible) -> Iterator[None]:
        """Within the body, the first Ctrl-C ends the run with this update, and the second raises KeyboardInterrupt.

        In a world of one it ends a wait for data too; several ranks must end with the same update, so they learn of the
        request with a coming one.
        """
        if not _is_free(signal.SIGINT, signal.default_int_handler):
            yield
            return

        def interrupt(number: int) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            logger.warning(
                "interrupted: finishing this update, then saving. Press Ctrl-C again to stop at once"
            )
            if self._all_ranks.size > 1:
                self.stop_requested = True
                return
            run.stop()
            if run.waits_for_data:
                raise WaitBrokenOff

        with handling(signal.SIGINT, interrupt):
            yield

    def check_wait(self) -> None:
        """Called before a wait for data, because a signal since the previous update had no wait to interrupt. Raises
        WaitBrokenOff if there was one, in a world of one.
        """
        if self._all_ranks.size == 1 and (self.stopped or self.preemption_requested):
            raise WaitBrokenOff

    def stop(self) -> None:
        """End the run with this update on all ranks."""
        self.stopped = self.epoch_goes_on = True

    def is_preempted(self) -> bool:
        """Return True if any rank got a scheduler's signal. Collective."""
        return not self._all_ranks.vote(not self.preemption_requested)

    def saved(self) -> None:
        """Called once the save that a stop requests has begun."""
        self.stopped = False


def _is_free(number: int, default: Any) -> bool:
    """Return True if this thread can take a signal, and the script has no handler of its own for it."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    return on_main_thread and signal.getsignal(number) is default
