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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.checkpoint.background_call import BackgroundCall
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
    """The save under way.

    Attributes:
        writing: of this rank's files.
        agreed: whether all ranks know that all have written theirs, so that it may be committed.
        seen: whether the keeper has seen that, without talking to the others.
        commit: by the keeper.
        ended: set once the save has ended.
    """

    step: int
    draft: Draft
    writing: BackgroundCall
    agreed: bool = False
    seen: bool = False
    commit: BackgroundCall | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def error(self) -> Exception | None:
        """What went wrong on this rank, so far."""
        calls = [self.writing] if self.commit is None else [self.writing, self.commit]
        error = next((call.error for call in calls if call.error is not None), None)
        return None if error is None else _as_failure(self.step, error)

    @property
    def settled(self) -> bool:
        """Whether this rank has done all that it does for this save."""
        return self.agreed and (self.commit is None or self.commit.ended)

    def start_commit(self) -> None:
        """All ranks have written: the keeper commits."""
        self.agreed = True
        if self.commit is not None:
            self.commit.start()

    def wait_for_commit(self) -> None:
        if self.commit is not None:
            self.commit.wait()


class BackgroundSaver:
    """At most one save under way. `begin` and `finish` are collective, `agreed` is called with the same sums on every
    rank; nothing else talks.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager, self._store = manager, manager.store
        self._flight: _Flight | None = None
        self._begun = 0

    @property
    def busy(self) -> bool:
        return self._flight is not None

    def counters(self) -> Counters:
        flight, begun = self._flight, self._begun
        if flight is None:
            return Counters(begun, begun, False)
        # A thread notes its failure before its end, so an end that is seen here is told with its failure.
        written, settled = begun - (not flight.writing.ended), begun - (not flight.settled)
        return Counters(written, settled, flight.error is not None)

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
        try:
            draft = store.begin(
                step,
                meta,
                names=content.names(store.rank, store.keeps),
                needed=content.disk_bytes(store.writers),
            )
        except Exception as error:
            self._report(step, error)
            return False

        def write() -> None:
            _give_way()
            arrived()
            content.write(draft, store.keeps)
            draft.seal()

        def commit() -> None:
            _give_way()
            store.commit(draft)
            self._manager.prune(protected)

        name = f"windlass-save-{step}"
        flight = _Flight(step, draft, BackgroundCall(name, write))
        if store.keeps:
            flight.commit = BackgroundCall(name, commit)
        self._flight = flight
        self._begun += 1
        flight.writing.start()
        return True

    def commit_when_seen(self) -> None:
        """Let the keeper commit the save under way as soon as it sees that all ranks of its disk have written, for a
        loop whose ranks do not exchange counters. Where there are several disks, that is for `finish` to find out.
        """
        flight, store = self._flight, self._store
        if flight is None or flight.commit is None or store.disks.nodes > 1:
            return
        commit = flight.commit

        def watch() -> None:
            flight.writing.wait()
            while flight.writing.succeeded and not flight.ended.is_set():
                if flight.draft.is_sealed_by_others():
                    flight.seen = True
                    commit.start()
                    return
                flight.ended.wait(_WAIT)

        BackgroundCall(f"windlass-watch-{flight.step}", watch).start()

    def agreed(self, sums: Sequence[float]) -> Outcome | None:
        """Go on with the save under way as far as all ranks have come; gives how it ended, once.

        Args:
            sums: the counters of all ranks, added up.
        """
        flight, counts = self._flight, Counters(*sums)
        if flight is None:
            return None
        everyone = self._store.world * self._begun
        if not flight.agreed:
            if counts.written < everyone:
                return None
            if counts.failed:
                return self._end(flight, dropped=True)
            flight.start_commit()
        if counts.settled < everyone:
            return None
        return self._end(flight, dropped=bool(counts.failed))

    def finish(self) -> Outcome | None:
        """Wait for the save under way and end it, on every rank; None where there is none.

        An exception of a signal handler may end the wait at any instant: nothing is committed then, and a further call
        (or `leave`) goes on where this one was.
        """
        flight = self._flight
        if flight is None:
            return None
        flight.writing.wait()
        if not flight.agreed:
            if not self._store.vote(flight.error is None):
                return self._end(flight, dropped=True)
            flight.start_commit()
        flight.wait_for_commit()
        return self._end(flight, dropped=not self._store.vote(flight.error is None))

    def wait(self) -> None:
        """Wait until this rank's thread has ended, however the save goes on."""
        flight = self._flight
        if flight is not None:
            flight.writing.wait()
            if flight.agreed:
                flight.wait_for_commit()

    def leave(self) -> None:
        """End the save under way with what this rank can do alone, for a run that ends in an error: the keeper commits
        where it sees that all ranks have written. Where there are several disks it cannot see that.
        """
        flight, store = self._flight, self._store
        if flight is None:
            return
        flight.writing.wait()
        if not flight.agreed:
            sees_all = store.keeps and store.disks.nodes == 1 and flight.error is None
            if not (sees_all and _is_sealed_in_time(flight)):
                return
            flight.start_commit()
        flight.wait_for_commit()

    # --- its end

    def _end(self, flight: _Flight, dropped: bool) -> Outcome:
        self._flight = None
        flight.ended.set()
        if not dropped:
            return Outcome(flight.step, self._store.path_for(flight.step))
        error = flight.error or SaveDropped(
            f"checkpoint {flight.step} was dropped: another rank could not write its part"
        )
        self._store.drop(flight.draft)
        self._report(flight.step, error)
        return Outcome(flight.step, None)

    def _report(self, step: int, error: Exception) -> None:
        """Log that a save failed.

        Raises:
            Exception: the error itself, if it is none of the disk: it will not go away by itself.
        """
        if not costs_one_save(error):
            raise error
        self._manager.warn(step, error)


def _is_sealed_in_time(flight: _Flight) -> bool:
    """Whether the others of this disk have sealed the draft, or do so shortly."""
    until = time.monotonic() + _PATIENCE
    while not (flight.seen or flight.draft.is_sealed_by_others()):
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
