"""Saves that failed: when one is made again, and when a run has failed at it for too long."""

from __future__ import annotations

import time

from windlass.core.errors import CheckpointError
from windlass.core.logs import get_job_logger

logger = get_job_logger(__name__)
# Seconds before a further attempt: doubled after each that fails. Most errors of network storage pass in this time.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
# Seconds before each further attempt at the last save of a run, and of one that was told to leave.
LAST_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0)
LEAVING_PAUSES = (1.0, 3.0)


class SaveRetry:
    """Counts failed saves. All ranks call it alike, so all of them count alike; the main process's clock alone decides
    that a pause is over, which the others learn with the counts of their batches.

    Args:
        limit: failures, one after the other, at which the run ends; None: never. Those within the pause after a failure
            do not count: a run that saves every second does not end because of a minute without its disk.

    Attributes:
        reason: why the last save failed; None if it did not.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.reason: str | None = None
        self._failures, self._counted_at, self._counts = 0, -1, True
        self._since = self._retry_at = 0.0
        self._is_ordinary, self._owes_ordinary = True, False

    @property
    def failing(self) -> bool:
        """Whether the last save failed."""
        return self.reason is not None

    @property
    def owes_ordinary(self) -> bool:
        """Whether a save of the run's plan failed and none has been made since: the next one takes its place."""
        return self._owes_ordinary

    def is_due(self) -> bool:
        """Whether the pause after a failed save is over, by this rank's clock."""
        return self.failing and time.monotonic() >= self._retry_at

    def begin(self, step: int, due: bool, ordinary: bool) -> None:
        """An attempt begins.

        Args:
            due: whether the main process's clock said that a pause is over.
            ordinary: whether the checkpoint is one of the run's plan.
        """
        # What was sent before the last failure was known may still say that its pause is over.
        self._counts = not self.failing or (due and step > self._counted_at + 1)
        self._is_ordinary = ordinary

    def succeeded(self) -> None:
        if self.failing:
            logger.warning("saving works again, after %d failed saves", self._failures)
        self.reason, self._failures, self._owes_ordinary = None, 0, False
        self._counts = self._is_ordinary = True

    def failed(self, step: int, reason: str, newest: object) -> None:
        """An attempt failed.

        Args:
            newest: the last whole checkpoint of the run.

        Raises:
            CheckpointError: it was one too many.
        """
        now = time.monotonic()
        if not self.failing:
            self._since = now
        self.reason = reason
        self._owes_ordinary |= self._is_ordinary
        self._is_ordinary = True  # what a script saves by itself does not begin here
        if not self._counts:
            return
        self._failures, self._counted_at, self._counts = self._failures + 1, step, False
        if self._limit is not None and self._failures >= self._limit:
            raise CheckpointError(
                f"training ends at step {step}: saving failed {self._failures} times in a row "
                f"(max_save_failures={self._limit}) in {now - self._since:.0f} s, the last time because of: {reason}. "
                f"Last whole checkpoint: {newest or 'none of this run'}. Mend the output folder and resume from there"
            )
        pause = min(FIRST_PAUSE * 2.0 ** (self._failures - 1), LONGEST_PAUSE)
        self._retry_at = now + pause
        logger.warning("saving is tried again in %.0f s, or earlier if a save is due by then", pause)
