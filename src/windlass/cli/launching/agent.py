"""Torch's elastic agent, which starts the processes of one machine, with an eye on why they end and when they stall."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, SignalException

from windlass.cli.launching.failure_report import Incident, Kind, describe, say
from windlass.cli.launching.peers import OtherMachines, Peers, Place
from windlass.cli.launching.watch import Watch, Watched
from windlass.dist.beacon import FOLDER_VARIABLE, Lookout
from windlass.dist.rendezvous import Machines

# The processes that are left have this long to end by themselves when another has failed.
STOP_SECONDS = 5
# How long launchers wait for the accounts of other machines, and how long where their own processes only lost their
# peers and the cause lies with another machine; a machine that is silent for so long then is that cause.
_LISTEN_SECONDS = 2.0
_FIND_OUT_SECONDS = 8.0
_SILENT_SECONDS = 5.0
# What schedulers send once, twice, or to the launcher and the processes.
_REPEATED = (signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take.

    Attributes:
        stall: seconds without a mark after which a process counts as stalled; None never.
        grace: seconds that processes have to end when the launcher itself is told to stop.
        machine: seconds without a sign of another machine's launcher after which that machine is lost.
    """

    stall: float | None = None
    grace: int = 120
    machine: float = 30.0


class OptionalLogs(DefaultLogsSpecs):
    """Files for the output and the errors of processes; none for an attempt whose files cannot be made."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        try:
            return super().reify(envs)
        except OSError as error:
            say(f"without files of the processes: {error}")
            return DefaultLogsSpecs(log_dir=os.devnull).reify(envs)


class WatchingAgent(LocalElasticAgent):
    """Starts processes anew after a failure, as torch's agent does, and keeps an account of every failure.

    Attributes:
        incidents: one for each attempt that did not end well, in order.
        told: the launcher itself was told to stop.
    """

    told = False

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, folder: Path, patience: Patience, prefix: str | None
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=patience.grace, log_line_prefix_template=prefix)
        self.incidents: list[Incident] = []
        self._folder = folder
        self._patience = patience
        self._attempt = 0
        self._watch: Watch | None = None
        self._peers = Peers()
        self._ended: RunResult | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        lookouts = self._lookouts(worker_group)
        self._meet_peers(worker_group)
        pids: dict[int, int] = super()._start_workers(worker_group)
        self._watch = Watch(worker_group.group_rank or 0, self._watched(worker_group, pids, lookouts))
        return pids

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._peers.stop()
        super()._rendezvous(worker_group)

    def _meet_peers(self, group: WorkerGroup) -> None:
        self._ended, self._peers = None, Peers()
        if isinstance(self._rdzv_handler, Machines):
            handler, place = (
                self._rdzv_handler,
                Place(group.group_rank or 0, _machines(group), self._patience.machine),
            )
            peers = OtherMachines(handler.attempt_store(), place, handler.ask_waiting)
            handler.answer_waiting(lambda: peers.waiting)
            self._peers = peers

    def _lookouts(self, group: WorkerGroup) -> list[Lookout]:
        """One for each process; they show nothing where the folder of this attempt cannot be written."""
        marks = self._attempt_folder
        os.environ[FOLDER_VARIABLE] = str(marks)
        try:
            marks.mkdir(parents=True)
            return [Lookout(marks, worker.global_rank, make=True) for worker in group.workers]
        except OSError as error:
            say(f"without marks of the processes: {error}")
            return [Lookout(marks, worker.global_rank) for worker in group.workers]

    @property
    def _attempt_folder(self) -> Path:
        return self._folder / f"attempt-{self._attempt}"

    def _watched(self, group: WorkerGroup, pids: dict[int, int], lookouts: list[Lookout]) -> list[Watched]:
        context: Any = self._pcontext
        return [
            Watched(
                worker.global_rank,
                pids[worker.local_rank],
                context.subprocess_handlers[worker.local_rank].proc.poll,
                context.error_files[worker.local_rank],
                lookout,
            )
            for worker, lookout in zip(group.workers, lookouts, strict=True)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        watch = self._watch
        if watch is not None and watch.leaving():
            self._wait_for_the_rest(watch)
        if self.has_left:
            self._remaining_restarts = 0
            self._wait_for_other_machines()
            return RunResult(state=WorkerState.FAILED)
        if watch is not None:
            kind = self._trouble(watch)
            if kind is not None:
                self._account_for(watch, kind, worker_group)
                return RunResult(state=WorkerState.FAILED)
        if self._ended is None:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state != WorkerState.SUCCEEDED:
                return result
            self._ended = result
            self._peers.note_ended()
        # Until the last machine has ended well, the job may have to start again on all of them.
        return self._ended if self._peers.all_ended else RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        self._peers.leave()

    def _account_for(self, watch: Watch, kind: Kind, group: WorkerGroup) -> None:
        self._watch = None  # its account is taken
        incident = watch.incident(kind)
        if self._peers.store_lost or self._peers.gave_up:
            self._remaining_restarts = 0
        self._peers.tell(incident, final=self._remaining_restarts == 0)
        self._stop_the_rest()
        incident = self._with_others(incident, group)
        if self._peers.store_lost:
            self._remaining_restarts = 0
        self.incidents.append(incident)
        self._report(incident, group)

    @property
    def store_lost(self) -> bool:
        """The machine that held the store is gone: nobody answers what is asked of it."""
        return self._peers.store_lost

    @property
    def has_left(self) -> bool:
        """Every process has ended, asked by a scheduler to leave."""
        return self._watch is not None and self._watch.leaving() and None not in self._watch.codes()

    @property
    def left_at(self) -> int | None:
        """The step at which they left; None where it is not known."""
        return None if self._watch is None else self._watch.left_at()

    def _wait_for_the_rest(self, watch: Watch) -> None:
        """Ranks that leave agree on an update and save: they need not end in one moment."""
        end = time.monotonic() + self._patience.grace
        while watch.leaving() and not self.has_left and time.monotonic() < end:
            time.sleep(0.1)
        if watch.leaving() and not self.has_left:
            self._stop_the_rest()

    def _wait_for_other_machines(self) -> None:
        """The one that the others meet at would take the store along, which they still look into."""
        self._peers.note_ended()
        end = time.monotonic() + self._patience.grace
        while not self._peers.all_ended and not self._peers.lost() and time.monotonic() < end:
            time.sleep(0.1)
        self._peers.leave()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.told = self.told or sys.exc_info()[0] is SignalException
        if self.told:
            # Torch would take a second signal for an error of its own, and leave the processes alone.
            for number in _REPEATED:
                signal.signal(number, signal.SIG_IGN)
        super()._shutdown(death_sig, timeout)
        if self.told and self.has_left:
            self._wait_for_other_machines()

    def _trouble(self, watch: Watch) -> Kind | None:
        if watch.failed():
            return "failed"
        now = time.monotonic()
        if watch.ended_early():
            self._peers.note_early()
        if watch.deserted(now, self._peers.early):
            return "deserted"
        if self._patience.stall is not None and watch.stalled(self._patience.stall, now):
            return "stalled"
        if self._peers.incidents():
            return "abandoned"
        return "lost" if self._peers.lost() else None

    def _with_others(self, incident: Incident, group: WorkerGroup) -> Incident:
        """With the ranks of machines that report soon after; waits longer where its own do not tell the cause."""
        start = time.monotonic()
        while True:
            joined = incident
            for theirs in self._peers.incidents().values():
                joined = joined.joined_with(theirs)
            joined.lost = self._peers.lost(None if joined.kind == "lost" else _SILENT_SECONDS)
            patience = _LISTEN_SECONDS if joined.knows_its_cause else _FIND_OUT_SECONDS
            complete = len(self._peers.incidents()) + len(joined.lost) + 1 >= _machines(group)
            if complete or time.monotonic() - start > patience:
                return joined
            time.sleep(0.1)

    def _report(self, incident: Incident, group: WorkerGroup) -> None:
        text = describe(incident, group.workers[0].world_size, str(self._folder))
        path = self._attempt_folder / "report.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the temporary folder
            path.write_text(text + "\n", "utf-8", errors="replace")
        except OSError as error:
            text += f"\nThis report is not in a file: {error}"
        say(text)
        if self._remaining_restarts > 0:
            done = group.spec.max_restarts - self._remaining_restarts + 1
            say(f"restart {done} of {group.spec.max_restarts}")

    def _stop_the_rest(self) -> None:
        context: Any = self._pcontext
        context._close(death_sig=signal.SIGTERM, timeout=STOP_SECONDS)


def _machines(group: WorkerGroup) -> int:
    return group.group_world_size or 1
