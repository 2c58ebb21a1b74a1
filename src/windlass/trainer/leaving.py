"""Preemption: a scheduler wants the machine back, and all ranks leave at one update, saved, with a code of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from windlass.config.quantities import seconds
from windlass.core.errors import EXIT_PREEMPTED, Preempted
from windlass.core.job_signals import surviving_hangup
from windlass.core.logs import get_job_logger
from windlass.trainer import save_retry
from windlass.trainer.interrupt import Deadline, say, told_by_signals
from windlass.trainer.saving import SavingMixin

logger = get_job_logger(__name__)


class WaitBrokenOff(BaseException):
    """The process was told to leave while it waited for data."""


class LeavingMixin(SavingMixin):
    """Taking a scheduler's signals, and leaving on them."""

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        """Within the body a signal of `preemption_signals` ends the run in an orderly way."""
        self._told_to_leave = self._leaving = False
        limit = self.args.preemption_deadline
        deadline = Deadline(None if limit is None else seconds(limit), EXIT_PREEMPTED, self._last_words)

        def tell(name: str) -> None:
            self._told_to_leave = True
            if self.is_world_process_zero():
                say(f"{name}: finishing this update, saving, and leaving with exit code {EXIT_PREEMPTED}")
            deadline.start()
            if self._gang.size == 1 and self._run is not None and self._run.loop.waits_for_data:
                raise WaitBrokenOff

        try:
            with told_by_signals(self.args.preemption_signals.split(), tell), surviving_hangup():
                yield
        finally:
            deadline.cancel()

    def _last_words(self) -> str:
        stands = self._newest_checkpoint or "no checkpoint of this run"
        return (
            f"not saved within preemption_deadline={self.args.preemption_deadline}: leaving; {stands} stands"
        )

    def _is_told(self) -> bool:
        """Whether some process was told to leave. Collective."""
        return not self._gang.vote(not self._told_to_leave)

    def _end_run(self) -> None:
        """Leave if some process was told to since the last update; see that the last save did not fail. Collective.

        Raises:
            Preempted: the run is saved as it ended. CheckpointError: it is not.
        """
        if not self._is_told():
            self._check_last_save()
            return
        if self._run.is_saved:
            self._leave()
        logger.warning(
            "told to leave after the last update, which was not to be saved: a job that is started again would make "
            "it again, so the script goes on to its end"
        )
        self._check_last_save()

    def _leave(self) -> None:
        """Every rank calls it, when it has saved.

        Raises:
            Preempted: always.
        """
        self._finish_last_save(save_retry.LEAVING_PAUSES)
        folder, step = self._newest_checkpoint, self.state.global_step
        logger.warning("leaving at step %d; the run goes on from %s", step, folder or "its beginning")
        raise Preempted(step, folder)
