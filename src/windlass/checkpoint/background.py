"""Saving while training goes on: a thread of every rank writes the copy, and ranks agree as part of an update.

The thread does not communicate. It records its progress in counters, which the training loop sends to the other ranks
with the counts of its batches. All ranks receive the sums at the same update, and the save continues there:

    copied -> every rank writes and seals its files -> all have written: the writer rank of the folder writes the
    manifest, renames, and applies the retention policy -> all know that it is committed: it is announced

Ranks of a loop of the user's own exchange no counters: there the writer rank commits when it sees that all have
written. `Saver` writes the checkpoints of both.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.checkpoint.content import Content
from windlass.checkpoint.host_memory import HostMemory
from windlass.checkpoint.manager import CheckpointManager, costs_one_save
from windlass.checkpoint.staged import StagedCheckpoint
from windlass.checkpoint.store import SaveDropped
from windlass.core.errors import CheckpointError
from windlass.dist.beacon import limited_wait
from windlass.dist.gang import Gang

# The writer gives way to what trains, where both want the same core.
_NICENESS = 10
# How long a run that ends in an error waits for what other ranks of the disk write (seconds): they may be gone.
_PATIENCE, _WAIT = 5.0, 0.05
_POLL = 0.2  # seconds after which a waiter looks again, if the wake-up was lost to an interrupt


class BackgroundCall:
    """Runs `work` once in another thread. `start` and `wait` may be interrupted at any instant, and called again.

    `threading.Thread` cannot promise that. An exception that a signal handler raises in `Thread.join` makes a running
    thread count as ended (CPython before 3.13), so a second `join` returns at once and what the thread was to write is
    taken for written; one that is raised in `Thread.start` or `Event.wait` can leave their lock held for ever. Here
    whether the work has ended is a fact that only its own thread states.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._claim: dict[str, object] = {}
        self._running = _thread.allocate_lock()  # held until the work has ended: it wakes who waits
        self._running.acquire()
        self._launched = self._ended = False
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def start(self) -> None:
        if self._launched:
            return
        try:
            _thread.start_new_thread(self._launch, (object(),))
        except RuntimeError:  # the system has no thread to give
            self._run(object())
        self._launched = True

    def _launch(self, token: object) -> None:
        # Signal handlers run in the main thread alone, so here it is safe to start a thread that has a name.
        try:
            threading.Thread(target=self._run, args=(token,), name=self._name, daemon=True).start()
        except RuntimeError:
            self._run(token)

    def wait(self) -> None:
        """Return once the work has ended; an error of it is in `error`."""
        self.start()  # does nothing, unless an interrupt prevented it
        if self._ended:
            return
        with limited_wait(f"wait for {self._name}"):
            while not self._ended:
                if self._running.acquire(timeout=_POLL):
                    self._running.release()

    def _run(self, token: object) -> None:
        # `start` may have been interrupted after it had launched a thread, and launch a second one.
        if self._claim.setdefault("by", token) is not token:
            return
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            # The thread ends after those who wait for the work go on: it must not keep a model.
            del self._work
            self._ended = True
            self._running.release()


class Counters(NamedTuple):
    """What a rank has done of its saves; sums over ranks are compared with what all of them would give."""

    # `written`, `settled`: saves that it has written, and that it knows to be committed or dropped, successful or not
    written: float
    settled: float
    failed: float  # whether its part of the save under way has failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended: its folder if it was committed, None if it failed."""

    step: int
    folder: Path | None


@dataclass(slots=True)
class _PendingSave:
    """The save under way."""

    step: int
    staged: StagedCheckpoint
    writing: BackgroundCall  # of this rank's files
    agreed: bool = False  # whether all ranks know that all have written theirs, so that it may be committed
    seen: bool = False  # whether the writer rank has seen that, without talking to the others
    commit: BackgroundCall | None = None  # by the writer rank
    ended: threading.Event = field(default_factory=threading.Event)  # set once the save has ended
    process: int = field(default_factory=os.getpid)  # which has its threads

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
        """All ranks have written: the writer rank commits."""
        self.agreed = True
        if self.commit is not None:
            self.commit.start()

    def wait_for_commit(self) -> None:
        if self.commit is not None:
            self.commit.wait()


class BackgroundSaver:
    """At most one save under way. `begin` and `finish` are collective, `agreed` is called with the same sums on every
    rank; nothing else talks.

    Attributes:
        busy: a save is under way; the same on every rank.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager, self._store = manager, manager.store
        self._pending: _PendingSave | None = None
        self.busy, self._begun = False, 0

    def counters(self) -> Counters:
        """This rank's progress, to be summed over ranks."""
        pending, begun = self._pending, self._begun
        if pending is None:
            return Counters(begun, begun, False)
        # A thread sets its error before it finishes, so a finished thread always reports its error.
        written, settled = begun - (not pending.writing.ended), begun - (not pending.settled)
        return Counters(written, settled, pending.error is not None)

    def begin(
        self,
        step: int,
        content: Content,
        arrived: Callable[[], None],
        *,
        meta: Mapping[str, Any],
        protected: list[Path],
    ) -> bool:
        """Start saving `content`, which must not change before the save has ended. Return True if it was started: a
        full disk costs this checkpoint only.

        Args:
            arrived: called in the thread before anything of `content` is read.
            protected: folders that retention spares.
        """
        assert self._pending is None, "a save is under way"
        store = self._store
        try:
            staged = store.begin(
                step,
                meta,
                names=content.names(store.rank, store.is_writer),
                needed=content.disk_bytes(store.writers),
            )
        except Exception as error:
            self._report(step, error)
            return False

        def write() -> None:
            _give_way()
            arrived()
            content.write(staged, store.is_writer)
            staged.seal()

        def commit() -> None:
            _give_way()
            store.commit(staged)
            self.manager.retention.apply(self._store, protected)

        name = f"windlass-save-{step}"
        pending = _PendingSave(step, staged, BackgroundCall(name, write))
        if store.is_writer:
            pending.commit = BackgroundCall(name, commit)
        self._pending, self.busy = pending, True
        self._begun += 1
        pending.writing.start()
        return True

    def commit_when_seen(self) -> None:
        """Let the writer rank commit the save under way as soon as it sees that all ranks of its disk have written,
        for a loop whose ranks do not exchange counters. With several disks, `finish` does it.
        """
        pending, store = self._pending, self._store
        if pending is None or pending.commit is None or store.disks.nodes > 1:
            return
        commit = pending.commit

        def watch() -> None:
            # Not `writing.wait`, which marks the process as waiting: the script goes on meanwhile.
            while pending.writing.error is None and not pending.ended.is_set():
                if pending.writing.ended and pending.staged.is_sealed_by_others():
                    pending.seen = True
                    commit.start()
                    return
                pending.ended.wait(_WAIT)

        BackgroundCall(f"windlass-watch-{pending.step}", watch).start()

    def agreed(self, sums: Sequence[float]) -> Outcome | None:
        """Go on with the save under way as far as all ranks have come; return how it ended, once.

        Args:
            sums: the counters of all ranks, added up.
        """
        pending, counts = self._pending, Counters(*sums)
        if pending is None:
            return None
        everyone = self._store.ranks * self._begun
        if not pending.agreed:
            if counts.written < everyone:
                return None
            if counts.failed:
                return self._end(pending, dropped=True)
            pending.start_commit()
        if counts.settled < everyone:
            return None
        return self._end(pending, dropped=bool(counts.failed))

    def finish(self) -> Outcome | None:
        """Wait for the save under way and end it, on every rank; None if there is none.

        An exception of a signal handler may end the wait at any instant: nothing is committed then, and a further call
        (or `leave`) goes on where this one was.
        """
        pending = self._own_pending
        if pending is None:
            return None
        pending.writing.wait()
        if not pending.agreed:
            if not self._store.vote(pending.error is None):
                return self._end(pending, dropped=True)
            pending.start_commit()
        pending.wait_for_commit()
        return self._end(pending, dropped=not self._store.vote(pending.error is None))

    def wait(self) -> None:
        """Wait until this rank's thread has ended, however the save goes on."""
        pending = self._own_pending
        if pending is not None:
            pending.writing.wait()
            if pending.agreed:
                pending.wait_for_commit()

    def leave(self) -> None:
        """End the save under way with what this rank can do alone, for a run that ends in an error: the writer
        rank commits if it sees that all ranks have written. With several disks it cannot see that.
        """
        pending, store = self._own_pending, self._store
        if pending is None:
            return
        pending.writing.wait()
        if not pending.agreed:
            sees_all = store.is_writer and store.disks.nodes == 1 and pending.error is None
            if not (sees_all and _is_sealed_in_time(pending)):
                return
            pending.start_commit()
        pending.wait_for_commit()

    # --- its end

    @property
    def _own_pending(self) -> _PendingSave | None:
        """The save under way; None in a process that was forked meanwhile, in which none of its threads runs."""
        pending = self._pending
        return pending if pending is not None and pending.process == os.getpid() else None

    def _end(self, pending: _PendingSave, dropped: bool) -> Outcome:
        self._pending, self.busy = None, False
        pending.ended.set()
        if not dropped:
            return Outcome(pending.step, self._store.path_for(pending.step))
        error = pending.error or SaveDropped(
            f"checkpoint {pending.step} was dropped: another rank could not write its part"
        )
        self._store.drop(pending.staged)
        self._report(pending.step, error)
        return Outcome(pending.step, None)

    def _report(self, step: int, error: Exception) -> None:
        """Log that a save failed.

        Raises:
            Exception: the error itself, if it is none of the disk: it will not go away by itself.
        """
        if not costs_one_save(error):
            raise error
        self.manager.warn(step, error)


# --- what a loop uses -------------------------------------------------------------------------------------------------

Ended = Callable[[Path | None], None]


class Saver(BackgroundSaver):
    """Writes the checkpoints of one folder, at most one at a time.

    Args:
        memory: for copies, which several savers may use one after the other.
        exchanges: ranks send the progress of a save with the counts of their data (`counters`), and all learn at the
            same update that it is committed (`received`). A failure of the disk is logged, costs one checkpoint, and
            the loop continues. False: the writer rank commits when it sees that all ranks have left the lists of their
            files in the folder, and a failure is raised, because nothing saves again.
    """

    def __init__(
        self, manager: CheckpointManager, all_ranks: Gang, memory: HostMemory, *, exchanges: bool
    ) -> None:
        super().__init__(manager)
        self.memory, self._all_ranks, self._exchanges = memory, all_ranks, exchanges
        self._ended: Ended | None = None

    def save(
        self,
        step: int,
        content: Content,
        *,
        meta: Mapping[str, Any],
        background: bool,
        ended: Ended,
        protected: Iterable[Path] = (),
    ) -> None:
        """Save, or start to. Collective; no save may be under way.

        Args:
            background: write a copy while the caller continues, if all ranks have memory for it.
            ended: called with the folder once it is committed, or with None if the save failed: at once, or from
                `received` or `finish`.
            protected: folders that retention keeps, besides this save's.
        """
        manager, others = self.manager, list(protected)
        copied = self.memory.try_snapshot(content, self._all_ranks) if background else None
        if copied is None:
            write = manager.save if self._exchanges else manager.write
            ended(write(step, content, meta=meta, protected=others))
            return
        kept = [manager.store.path_for(step), *others]
        self._ended = ended  # before it begins, after which an interrupt may come
        if not self.begin(step, *copied, meta=meta, protected=kept):
            if not self._exchanges and manager.last_failure is not None:
                raise manager.last_failure
            ended(None)
        elif not self._exchanges:
            # If the script ends or fails without waiting, the checkpoint is still committed if possible.
            atexit.register(self.leave)
            self.commit_when_seen()

    def received(self, counters: Counters) -> None:
        """Apply the sums of all ranks' counters to the save under way."""
        self._announce(self.agreed(counters))

    def finish(self) -> None:
        """Wait for the save under way. Collective."""
        try:
            outcome = super().finish()
        except Exception:
            atexit.unregister(self.leave)
            raise
        self._announce(outcome)

    def _announce(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            ended, self._ended = self._ended, None
            assert ended is not None
            atexit.unregister(self.leave)
            ended(outcome.folder)


def _is_sealed_in_time(pending: _PendingSave) -> bool:
    """Return True if the other ranks of this disk have sealed their files, or do so within `_PATIENCE` seconds."""
    until = time.monotonic() + _PATIENCE
    while not (pending.seen or pending.staged.is_sealed_by_others()):
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
