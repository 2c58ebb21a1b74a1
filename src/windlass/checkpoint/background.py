"""Saving while training goes on: a thread of every rank writes what was copied, and the ranks agree in passing.

The thread talks to no other rank. What it has done stands in counters, which the training loop carries to the others
with the counts of its batches; their sums come back to all ranks at the same update, and there the save goes on:

    copied -> every rank writes and seals its files -> all have written: the keeper of the folder writes the manifest,
    renames and lets retention act -> all know that it stands: it is announced
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from windlass.checkpoint.content import Content
from windlass.checkpoint.draft import Draft
from windlass.checkpoint.manager import CheckpointManager, costs_one_save
from windlass.checkpoint.store import SaveDropped
from windlass.core.errors import CheckpointError

# The writer gives way to what trains, where both want the same core.
_NICENESS = 5
# How long a run that ends in an error waits for what other ranks of the disk write (seconds): they may be gone.
_PATIENCE, _WAIT = 5.0, 0.05


class Counters(NamedTuple):
    """What a rank has done of its saves; sums over ranks are compared with what all of them would give.

    Attributes:
        written, settled: saves that it has written, and that it knows to be committed or dropped, successful or not.
        failed: whether its part of the save under way has failed.
    """

    written: float
    settled: float
    failed: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended: where it stands, or None where it was given up."""

    step: int
    folder: Path | None


@dataclass(slots=True)
class _Flight:
    step: int
    draft: Draft
    protected: list[Path]
    thread: threading.Thread | None = None
    committing: bool = False
    error: Exception | None = None


class BackgroundSaver:
    """At most one save under way. `begin` and `finish` are collective, `agreed` is called with the same sums on every
    rank; nothing else talks.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager, self._store = manager, manager.store
        self._flight: _Flight | None = None
        self._begun = self._written = self._settled = 0

    @property
    def busy(self) -> bool:
        return self._flight is not None

    def counters(self) -> Counters:
        # The thread notes a failure before it counts, so what has been counted is told with its failure.
        written, settled = self._written, self._settled
        failed = self._flight is not None and self._flight.error is not None
        return Counters(written, settled, failed)

    def begin(
        self,
        step: int,
        content: Content,
        arrived: Callable[[], None],
        *,
        meta: Mapping[str, Any],
        protected: list[Path],
    ) -> bool:
        """Start saving `content`, which must not change before the save has ended. Gives whether it was started: a
        full disk costs this checkpoint only.

        Args:
            arrived: called in the thread before anything of `content` is read.
            protected: folders that retention spares.
        """
        assert self._flight is None, "a save is under way"
        store = self._store
        draft = store.draft(step, meta)
        try:
            with store.agreed(step):
                store.open(draft, content.disk_bytes(store.writers))
        except Exception as error:
            self._give_up(step, draft, error)
            return False
        self._begun += 1
        flight = _Flight(step, draft, protected)

        def write() -> None:
            arrived()
            content.write(draft, store.keeps)
            draft.seal()

        self._flight = flight
        self._start(write, self._count_written)
        return True

    def agreed(self, sums: Sequence[float]) -> Outcome | None:
        """Go on with the save under way as far as all ranks have come; gives how it ended, once.

        Args:
            sums: the counters of all ranks, added up.
        """
        flight, counts = self._flight, Counters(*sums)
        if flight is None:
            return None
        everyone = self._store.world * self._begun
        if not flight.committing:
            if counts.written < everyone:
                return None
            if counts.failed:
                self._settled = self._begun
                return self._end(dropped=True)
            self._commit()
        if counts.settled < everyone:
            return None
        return self._end(dropped=bool(counts.failed))

    def finish(self) -> Outcome | None:
        """Wait for the save under way and end it, on every rank; None where there is none."""
        flight = self._flight
        if flight is None:
            return None
        self._join()
        if not flight.committing:
            if not self._store.vote(flight.error is None):
                self._settled = self._begun
                return self._end(dropped=True)
            self._commit()
            self._join()
        return self._end(dropped=not self._store.vote(flight.error is None))

    def leave(self) -> None:
        """End the save under way with what this rank can do alone, for a run that ends in an error: the keeper commits
        where it sees that all ranks have written. Where there are several disks it cannot see that.
        """
        self._join()
        flight, store = self._flight, self._store
        if flight is None or flight.committing or flight.error is not None:
            return
        if store.keeps and store.disks.nodes == 1 and _is_sealed_in_time(flight.draft):
            self._commit()
            self._join()

    # --- the thread

    def _start(self, work: Callable[[], None], count: Callable[[], None]) -> None:
        flight = self._flight
        assert flight is not None

        def run() -> None:
            _give_way()
            try:
                work()
            except BaseException as error:  # a panic of compiled code, say
                flight.error = _as_failure(flight.step, error)
            count()

        flight.thread = threading.Thread(target=run, name=f"windlass-save-{flight.step}", daemon=True)
        flight.thread.start()

    def _join(self) -> None:
        if self._flight is not None and self._flight.thread is not None:
            self._flight.thread.join()

    def _count_written(self) -> None:
        self._written = self._begun

    def _count_settled(self) -> None:
        self._settled = self._begun

    def _commit(self) -> None:
        flight = self._flight
        assert flight is not None
        flight.committing = True
        if not self._store.keeps:
            self._count_settled()
            return

        def commit() -> None:
            self._store.commit(flight.draft)
            self._manager.prune(flight.protected)

        self._start(commit, self._count_settled)

    # --- its end

    def _end(self, dropped: bool) -> Outcome:
        flight, self._flight = self._flight, None
        assert flight is not None
        if not dropped:
            return Outcome(flight.step, self._store.path_for(flight.step))
        error = flight.error or SaveDropped(
            f"checkpoint {flight.step} was dropped: another rank could not write its part"
        )
        self._give_up(flight.step, flight.draft, error)
        return Outcome(flight.step, None)

    def _give_up(self, step: int, draft: Draft, error: Exception) -> None:
        """Drop the draft and say so.

        Raises:
            Exception: what went wrong here, where it is no failure of a disk: it will not go away by itself.
        """
        self._store.drop(draft)
        if not costs_one_save(error):
            raise error
        self._manager.warn(step, error)


def _is_sealed_in_time(draft: Draft) -> bool:
    """Whether the others of this disk have sealed the draft, or do so shortly."""
    until = time.monotonic() + _PATIENCE
    while not draft.is_sealed_by_others():
        if time.monotonic() > until:
            return False
        time.sleep(_WAIT)
    return True


def _as_failure(step: int, error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    failure = CheckpointError(f"checkpoint {step} could not be written: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _give_way() -> None:
    """Lower this thread's priority, where the system has priorities of threads."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
