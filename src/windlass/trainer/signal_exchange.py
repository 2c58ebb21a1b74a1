"""Signals that ranks exchange while they train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from windlass.checkpoint.background import Counters
from windlass.core.run_clock import SAVE, run_clock
from windlass.dist.gang import Gang
from windlass.trainer.interruption import Interruption
from windlass.trainer.run_checkpoints import RunCheckpoints


class Signals(NamedTuple):
    """Numbers that every rank sends with each group of data; their sums reach all ranks at the same update."""

    stop: float = 0.0  # requests to end the run with this update
    leave: float = 0.0  # processes that got a scheduler's signal
    # The main process's clock requests an ephemeral checkpoint, or one to replace a failed one
    save_due: float = 0.0
    # `written`, `settled`, `failed`: the counters of the save under way (`checkpoint.background.Counters`)
    written: float = 0.0
    settled: float = 0.0
    failed: float = 0.0


_NONE = Signals()


class SignalExchange:
    """Collects this rank's signals, and applies the sums over all ranks.

    Attributes:
        clock_asks: by the last exchange, the clock requests a checkpoint.
        save_due: the same, and there is something new to save.
    """

    def __init__(self, all_ranks: Gang, interruption: Interruption, checkpoints: RunCheckpoints) -> None:
        self._all_ranks, self._interruption, self._checkpoints = all_ranks, interruption, checkpoints
        self._saver = checkpoints.saver
        self.clock_asks = self.save_due = False
        self._saved_step = 0

    def own(self) -> Signals:
        """This rank's signals."""
        checkpoints, interruption = self._checkpoints, self._interruption
        due = self._all_ranks.rank == 0 and time.monotonic() >= checkpoints.due_at
        asks = due or interruption.stop_requested or interruption.preemption_requested
        if not asks and not self._saver.busy:
            return _NONE  # the usual case, in every update
        return Signals(
            interruption.stop_requested, interruption.preemption_requested, due, *self._saver.counters()
        )

    def apply(self, sums: Sequence[float], step: int) -> Signals:
        """Apply the signals of all ranks, given as sums, at the present step."""
        received = Signals(*sums) if any(sums) else _NONE
        self._interruption.preempted |= received.leave > 0
        if received is not _NONE and self._saver.busy:
            with run_clock().within(SAVE):
                self._saver.received(Counters(received.written, received.settled, received.failed))
        self.clock_asks = received.save_due > 0
        # A signal that was sent before a save began still requests it. And the clock does not replace the checkpoint
        # that the run was resumed from.
        self.save_due = self.clock_asks and step - self._saved_step > 1 and not self._saver.busy
        return received

    def saved(self, step: int) -> None:
        """Called before a save of this step, or if the run was resumed from one."""
        self.save_due, self._saved_step = False, step
