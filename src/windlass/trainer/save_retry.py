"""Saves that failed: when to try again, and when to end the run."""

from __future__ import annotations

import time

from windlass.core.errors import CheckpointError
from windlass.core.logs import get_job_logger

logger = get_job_logger(__name__)
# Seconds before a further attempt: doubled after each that fails. Most errors of network storage pass in this time.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
# Seconds before each further attempt at the last save of a run, and of a run that was preempted.
LAST_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0)
LEAVING_PAUSES = (1.0, 3.0)


class SaveRetry:
    """Counts failed saves. All ranks make the same calls, so they count alike; only the main process's clock decides
    that a pause is over, which the others learn with the counts of their batches.

    Args:
        limit: consecutive failures at which the run ends; None: never. Those within the pause after a failure do not
            count: a run that saves every second does not end because of a minute without its disk.

    Attributes:
        reason: why the last save failed; None if it did not.
        owes_ordinary: a save of the run's plan failed and none has succeeded since: the next one replaces it.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.reason: str | None = None
        self.owes_ordinary = False
        self._failures, self._counted_at, self._counts = 0, -1, True
        self._since = self._retry_at = 0.0
        self._is_ordinary = True

    def is_due(self) -> bool:
        """Return True if the pause after a failed save is over, by this rank's clock."""
        return self.reason is not None and time.monotonic() >= self._retry_at

    def begin(self, step: int, due: bool, ordinary: bool) -> None:
        """Called before an attempt.

        Args:
            due: the main process's clock reported that a pause is over.
            ordinary: the checkpoint is one of the run's plan.
        """
        # What was sent before the last failure was known may still report the end of its pause.
        self._counts = self.reason is None or (due and step > self._counted_at + 1)
        self._is_ordinary = ordinary

    def succeeded(self) -> None:
        if self.reason is not None:
            logger.warning("saving works again, after %d failed saves", self._failures)
        self.reason, self._failures, self.owes_ordinary = None, 0, False
        self._counts = self._is_ordinary = True

    def failed(self, step: int, reason: str, newest: object) -> None:
        """Called after an attempt that failed; raise CheckpointError, which names the newest checkpoint, if too many
        have.
        """
        now = time.monotonic()
        if self.reason is None:
            self._since = now
        self.reason = reason
        self.owes_ordinary |= self._is_ordinary
        self._is_ordinary = True  # saves that a script starts itself do not call `begin`
        if not self._counts:
            return
        self._failures, self._counted_at, self._counts = self._failures + 1, step, False
        if self._limit is not None and self._failures >= self._limit:
            raise CheckpointError(
                f"training ends at step {step}: saving failed {self._failures} times in a row "
                f"(max_save_failures={self._limit}) in {now - self._since:.0f} s, the last time because of: {reason}. "
                f"Last whole checkpoint: {newest or 'none of this run'}. Repair the output folder and resume from there"
            )
        pause = min(FIRST_PAUSE * 2.0 ** (self._failures - 1), LONGEST_PAUSE)
        self._retry_at = now + pause
        logger.warning("retrying the save in %.0f s, or earlier if a save is due by then", pause)
