"""The saves of one run: in the background if possible, and announced once they are committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.background import BackgroundSaver, Counters, Outcome
from windlass.checkpoint.content import Content
from windlass.checkpoint.history import HistoryKeeper
from windlass.checkpoint.host_memory import HostMemory, room_on_machine
from windlass.checkpoint.manager import CheckpointManager
from windlass.config.plan import SavePlan
from windlass.core.logs import get_logger
from windlass.dist.gang import Gang
from windlass.trainer.save_retry import SaveRetry

logger = get_logger(__name__)

Ended = Callable[[Path | None], None]


class RunSaver:
    """Writes checkpoints, at most one at a time.

    Attributes:
        history: what of `log_history` is saved; on the writer rank of the folder.
        retry: counts saves that failed.

    Args:
        may_wait: returns False if a checkpoint must be committed when the call that saves it returns. Ranks vote on it.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        plan: SavePlan,
        gang: Gang,
        device: torch.device,
        may_wait: Callable[[], bool],
    ) -> None:
        self.manager = manager
        self._plan, self._gang, self._may_wait = plan, gang, may_wait
        self.retry = SaveRetry(plan.max_failures)
        self._background = BackgroundSaver(manager)
        self.history = HistoryKeeper()
        self._memory = HostMemory(device)
        self._ended: Ended | None = None
        self._warned_too_large = False
        self._saved_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """True while a save is under way; the same on every rank."""
        return self._background.busy

    def is_due(self) -> bool:
        """Return True if this rank's clock requests a checkpoint: an ephemeral one, or one to replace a failed one."""
        if self.retry.reason is not None:
            return self.retry.is_due()
        every = self._plan.every
        return every is not None and time.monotonic() - self._saved_at >= every

    def counters(self) -> Counters:
        return self._background.counters()

    def save(
        self, step: int, content: Content, *, meta: Mapping[str, Any], protected: list[Path], ended: Ended
    ) -> None:
        """Save, or start to. Collective; no save may be under way.

        Args:
            protected: folders that retention keeps, besides this save's.
            ended: called with the folder once it is committed, or with None if the save failed: at once, or from
                `agreed` or `finish`.
        """
        self._saved_at = time.monotonic()
        snapshot = None
        if self._plan.background:
            may_wait = self._may_wait() and content.write_model is None
            fits = self._fits(content.tensor_bytes() if may_wait else 0)
            snapshot = self._try_snapshot(content) if may_wait and fits else None
        if not self._gang.vote(snapshot is not None):
            ended(self.manager.save(step, content, meta=meta, protected=protected))
            return
        assert snapshot is not None
        copied, arrived = snapshot
        if self._background.begin(
            step, copied, arrived, meta=meta, protected=[self.manager.store.path_for(step), *protected]
        ):
            self._ended = ended
        else:
            ended(None)

    def note_end(self, step: int, folder: Path | None, newest: Path | None) -> None:
        """Record how a save ended (a folder of None: it failed); raise CheckpointError if too many failed. `newest` is
        the last complete checkpoint of the run.
        """
        if folder is None:
            self.retry.failed(step, str(self.manager.last_failure), newest)
        else:
            self.history.saved(folder)
            self.retry.succeeded()

    def agreed(self, counters: Counters) -> None:
        """Apply what all ranks know of the progress of the save under way."""
        self._report(self._background.agreed(counters))

    def finish(self) -> None:
        """Wait for the save under way. Collective."""
        self._report(self._background.finish())

    def wait(self) -> None:
        """Wait until no thread of this rank writes. Not collective."""
        self._background.wait()

    def leave(self) -> None:
        """Finish what this rank can finish alone: the run ends in an error, and other ranks may be anywhere."""
        if self._gang.size == 1:
            self.finish()
        else:
            self._background.leave()

    def release(self) -> None:
        """Free the memory of copies."""
        self._memory = HostMemory(torch.device("cpu"))

    def _report(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            ended, self._ended = self._ended, None
            assert ended is not None
            ended(outcome.folder)

    def _try_snapshot(self, content: Content) -> tuple[Content, Callable[[], None]] | None:
        """Return a copy in host memory, or None if there is no room: an error here would leave other ranks waiting."""
        try:
            return self._memory.snapshot(content)
        except (MemoryError, RuntimeError) as error:
            logger.info("no copy in host memory (%s): training waits while this checkpoint is written", error)
            return None

    def _fits(self, needed: int) -> bool:
        """Return True if there is memory for copies of `needed` bytes. Collective."""
        room = self._plan.host_memory
        if room is None:
            needed, room = room_on_machine(max(needed - self._memory.nbytes, 0), self._gang)
        if room is None or needed <= room:
            return True
        if not self._warned_too_large:
            self._warned_too_large = True
            logger.warning(
                "a checkpoint needs %s bytes of host memory to be written in the background, and %s may be used: "
                "training waits while it is written", f"{needed:,}", f"{room:,}"
            )  # fmt: skip
        return False
