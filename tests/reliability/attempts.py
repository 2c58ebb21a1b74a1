"""One attempt at a run: real processes, one for each rank, forked from one that has imported everything."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.reliability.cases import SamplesSeen, Trial
from tests.reliability.faults import (
    BY_CLOCK,
    INTERRUPTED,
    WORKER_KILLED,
    Counts,
    Fault,
    arm,
    callbacks_of,
    count_operations,
)
from tests.reliability.whereabouts import on_a_new_machine, output_dir
from tests.trainer.resume_cases import bits, in_a_child, run

from windlass import TrainerCallback
from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.staged import StagedCheckpoint
from windlass.checkpoint.store import Store
from windlass.core.errors import EXIT_PREEMPTED, Preempted
from windlass.trainer import run_checkpoints

PATIENCE = 120.0  # seconds after which an attempt hangs; one takes less than a second when nothing else runs
LINGERING = 50.0  # seconds for which ranks may outlive one that was killed; an exchange gives up after 60
_TICK = 0.004
_WRITE_STACKS = signal.SIGRTMIN  # a rank answers with the stacks of its threads; Windlass handles others
_WRITING = 1.0  # seconds that it has for them
_STOPPED = 130  # how an attempt ends that Ctrl-C stopped, as in a shell
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Strike:
    """A fault, and what it needs to know of the run to find its place in it.

    Attributes:
        counts: how often each thing happens to the victim in an undisturbed run.
        left: the share of the run that is to be made.
        seconds: how long an undisturbed run takes.
    """

    fault: Fault
    counts: Mapping[str, int]
    left: float
    seconds: float

    @property
    def instant(self) -> float | None:
        """Seconds after which it strikes, where it does so by the clock. Starting takes time too."""
        by_clock = self.fault.kind in BY_CLOCK
        return self.fault.share * self.seconds * max(self.left, 0.3) if by_clock else None

    def fall(self, pids: Sequence[int], alive: Sequence[int], again: bool) -> float | None:
        """What happens at the instant; return the seconds until it is to happen again, None if that is all.

        Args:
            pids: of all ranks. alive: of those that run. again: whether it is the second time.
        """
        victims = [pid for pid in alive if self.fault.everyone or pid == pids[self.fault.victim]]
        if self.fault.kind == INTERRUPTED:
            for pid in victims:  # a terminal interrupts data workers, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGINT)
            return None if again else self.fault.gap
        if self.fault.kind == WORKER_KILLED:
            workers = [child for pid in victims for child in _children(pid)]
            if not workers:
                return _TICK if victims else None  # it starts some later
            _kill([workers[int(self.fault.share * len(workers))]])
            return None
        _kill([pid for pid in alive if pid == pids[self.fault.victim]])
        return None


@dataclass
class Ended:
    """How the ranks of an attempt ended.

    Attributes:
        codes: their exit codes, negative for a signal.
        hung: whether any had to be ended by force.
    """

    codes: list[int] = field(default_factory=list)
    hung: bool = False

    @property
    def killed(self) -> bool:
        return KILLED in self.codes and not self.hung

    @property
    def left(self) -> bool:
        """All did because they were preempted."""
        return set(self.codes) == {EXIT_PREEMPTED} and not self.hung

    @property
    def finished(self) -> bool:
        return not any(self.codes) and not self.hung


def preload(train: Callable[[Path], Any], folder: Path) -> None:
    """Import here what `train`, called with a folder, imports on its way, so that ranks need not: a child lists it.

    The run itself would leave threads behind, with which no process should be forked.
    """
    before = set(sys.modules)

    def tell() -> None:
        train(folder / "preloaded")
        (folder / "modules.txt").write_text("\n".join(sorted(set(sys.modules) - before)))

    assert in_a_child(tell) == 0
    for name in (folder / "modules.txt").read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # what a rank's own collections look at, it copies


def attempt(
    trial: Trial,
    folder: Path,
    world: int,
    *,
    resume: bool,
    strike: Strike | None = None,
) -> Ended:
    """Train in `folder`/run, from its newest checkpoint where `resume` is set.

    Args:
        strike: what happens to it; nothing if there is none.
    """
    number = len(list(folder.glob("meeting-*")))
    (folder / f"meeting-{number}").touch()
    pids = [
        fork_rank(
            lambda rank=rank: _rank(trial, folder, number, rank, world, resume, strike),  # type: ignore[misc]
            rank,
            world,
            folder / f"said-{number}-{rank}.txt",
        )
        for rank in range(world)
    ]
    try:
        return wait_for(pids, strike, lambda: len(list(folder.glob(f"met-{number}-*"))) == world)
    finally:
        end_all(pids)


class Met(TrainerCallback):
    """Marks that this rank has met the others: those of a rank that dies before are ended, as a launcher does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> None:
        self._path.touch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark()


def fork_rank(work: Callable[[], None], rank: int, world: int, said: Path) -> int:
    """Do `work` in a process with the variables of a launcher, which writes to `said`; return its pid."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(_WRITE_STACKS, file=descriptor)
        sys.stdout = sys.stderr = sys.__stderr__  # pytest has put objects of its own here
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        work()
        code = 0
    except BaseException as end:
        if isinstance(end, SystemExit) and isinstance(end.code, int):
            code = end.code
        if isinstance(end, KeyboardInterrupt):
            code = _STOPPED
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _rank(
    trial: Trial,
    folder: Path,
    number: int,
    rank: int,
    world: int,
    resume: bool,
    strike: Strike | None,
) -> None:
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting-{number}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE),
        )
    met = Met(folder / f"met-{number}-{rank}")
    callbacks: list[Any] = [] if trial.exact else [SamplesSeen(folder, rank, number)]
    if trial.meets_late:
        callbacks.append(met)
    else:
        met.mark()
    if trial.remote:
        on_a_new_machine(folder, number)
    run_checkpoints.LAST_PAUSES = (0.01,) * 5
    _note_commits(folder / f"committed-{rank}.txt", MirroredStore if trial.remote else Store)
    counts = None
    if strike is None and not resume:
        counts = Counts()
        count_operations(counts)
        callbacks.append(counts)
    elif strike is not None and (
        rank == strike.fault.victim or (strike.fault.leaves and strike.fault.everyone)
    ):
        arm(strike.fault, strike.fault.place(strike.counts, strike.left))
        callbacks += callbacks_of(strike.fault, strike.counts, strike.left)
    ctrl_c = CtrlC()
    try:
        trainer = run(output_dir(folder, trial, rank), trial.case, *callbacks, resume=resume or None)
    except Preempted as leaving:
        (folder / f"left-{rank}.txt").write_text(str(leaving.step))
        raise
    state = trainer.state
    # The first Ctrl-C lets `train` return early: before its last update, or without its last evaluation.
    if state.global_step < state.max_steps or ctrl_c.came():
        sys.exit(_STOPPED)
    end = {
        "bits": bits(trainer),
        "step": state.global_step,
        "epoch": state.epoch,
        "best": [state.best_metric, state.best_global_step],
        "counts": counts and counts.counts,
    }
    (folder / f"end-{rank}.json").write_text(json.dumps(end))


class CtrlC:
    """Notes if this process gets the signal of Ctrl-C from now on, no matter what handles it."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def came(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return signal.SIGINT in os.read(self._read, 1000)
        return False


def _note_commits(path: Path, kind: type[Store]) -> None:
    """Write down each step that this rank committed, when it was."""
    original = kind.commit

    def commit(self: Store, staged: StagedCheckpoint) -> None:
        original(self, staged)
        if self.is_writer:
            with path.open("a") as file:
                file.write(f"{staged.step}\n")

    kind.commit = commit  # type: ignore[method-assign]


def wait_for(pids: Sequence[int], strike: Strike | None, met: Callable[[], bool]) -> Ended:
    """Wait for all ranks. Where one dies before they have met, the others are ended, as a launcher does."""
    started, codes = time.monotonic(), dict[int, int]()
    alive, hung = list(pids), False
    instant, again = None if strike is None else strike.instant, False
    together = strike is not None and strike.fault.everyone
    deadline = started + PATIENCE
    while alive:
        time.sleep(_TICK)
        codes |= _reaped(alive)
        alive = [pid for pid in alive if pid not in codes]
        passed = time.monotonic() - started
        # A process that is interrupted before it has begun ends in the code of these tests.
        if (
            strike is not None
            and instant is not None
            and passed >= instant
            and (met() or not strike.fault.interrupts)
        ):
            wait = strike.fall(pids, alive, again)
            instant, again = None if wait is None else passed + wait, True
        if KILLED in codes.values() and not hung:
            deadline = min(deadline, time.monotonic() + LINGERING)
            if together or not met():
                _kill(alive)
        if alive and time.monotonic() > deadline:
            # First the stacks: they show what the ranks waited for.
            _kill(alive, signal.SIGKILL if hung else _WRITE_STACKS)
            hung, deadline = True, time.monotonic() + _WRITING
    return Ended([codes[pid] for pid in pids], hung)


def _children(pid: int) -> list[int]:
    """Of a rank: its data workers."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _reaped(pids: Sequence[int]) -> dict[int, int]:
    """Exit codes of those that have ended."""
    ended = (os.waitpid(pid, os.WNOHANG) for pid in pids)
    return {pid: os.waitstatus_to_exitcode(status) for pid, status in ended if pid}


def end_all(pids: Sequence[int]) -> None:
    """Kill what is left of ranks. Each leads a group: its workers end with it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _kill(pids: Sequence[int], by: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, by)
