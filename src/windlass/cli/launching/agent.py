"""Torch's elastic agent, which starts the processes of one machine, extended to report why they fail or stall."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, SignalException

from windlass.cli.launching.failure_report import Incident, Kind, Watch, Watched, describe, say
from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.peers import OtherMachines, Peers
from windlass.dist.beacon import FOLDER_VARIABLE, Lookout
from windlass.dist.rendezvous import Machines

# How long the remaining processes may take to end by themselves after one has failed.
STOP_SECONDS = 5
# How long launchers wait for the reports of other machines; longer if their own processes only lost their peers, so
# that the cause is on another machine. A machine that is silent for so long then is that cause.
_LISTEN_SECONDS = 2.0
_FIND_OUT_SECONDS = 8.0
_SILENT_SECONDS = 5.0
# Schedulers send these once, twice, or to the launcher and the processes.
_REPEATED = (signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM))


class OptionalLogs(DefaultLogsSpecs):
    """Log files of the processes; none for an attempt whose files cannot be made."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        try:
            return super().reify(envs)
        except OSError as error:
            say(f"without log files of the processes: {error}")
            return DefaultLogsSpecs(log_dir=os.devnull).reify(envs)


# Before torch 2.11 the agent has no such argument, and closes its processes with the default of their context.
_TAKES_GRACE = "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters


class WatchingAgent(LocalElasticAgent):
    """Restarts processes after a failure, as torch's agent does, and keeps an incident of every failure.

    Attributes:
        incidents: one for each failed attempt, in order.
        signalled: the launcher itself received a signal to stop.
    """

    signalled = False

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, folder: Path, plan: LaunchPlan) -> None:
        grace: dict[str, Any] = {"shutdown_timeout": plan.grace} if _TAKES_GRACE else {}
        super().__init__(spec, logs_specs, log_line_prefix_template="[rank ${rank}]: ", **grace)
        self.incidents: list[Incident] = []
        self._folder = folder
        self._plan = plan
        self._attempt = 0
        self._watch: Watch | None = None
        self._peers = Peers()
        self._ended: RunResult | None = None

    # --- what torch's agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        lookouts = self._lookouts(worker_group)
        self._connect_peers(worker_group)
        pids: dict[int, int] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        if not _TAKES_GRACE:
            context.close = functools.partial(context.close, timeout=self._plan.grace)
        watched = [
            Watched(
                worker.global_rank,
                pids[worker.local_rank],
                context.subprocess_handlers[worker.local_rank].proc.poll,
                context.error_files[worker.local_rank],
                lookout,
            )
            for worker, lookout in zip(worker_group.workers, lookouts, strict=True)
        ]
        self._watch = Watch(worker_group.group_rank or 0, watched)
        return pids

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._peers.stop()
        super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        watch = self._watch
        if watch is not None and watch.preempted():
            self._wait_until_all_exited(watch)
        if self.preempted:
            self._remaining_restarts = 0
            self._wait_for_other_machines()
            return RunResult(state=WorkerState.FAILED)
        if watch is not None:
            kind = self._trouble(watch)
            if kind is not None:
                self._handle_failure(watch, kind, worker_group)
                return RunResult(state=WorkerState.FAILED)
        if self._ended is None:
            # Torch would stop the others at once, and record no incident, where a process failed since it was looked at
            # above. So torch is asked only when all have succeeded.
            if watch is not None and any(code != 0 for code in watch.codes()):
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state != WorkerState.SUCCEEDED:
                return result
            self._ended = result
            self._peers.note_ended()
        # The job may have to restart on all machines until the last of them has succeeded.
        return self._ended if self._peers.all_ended else RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        self._peers.leave()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.signalled = self.signalled or sys.exc_info()[0] is SignalException
        if self.signalled:
            # Torch would treat a second signal as an error of its own, and leave the processes running.
            for number in _REPEATED:
                signal.signal(number, signal.SIG_IGN)
        super()._shutdown(death_sig, *((timeout,) if _TAKES_GRACE else ()))
        if self.signalled and self.preempted:
            self._wait_for_other_machines()

    # --- the start of an attempt

    def _connect_peers(self, group: WorkerGroup) -> None:
        self._ended, self._peers = None, Peers()
        handler = self._rdzv_handler
        if isinstance(handler, Machines):
            store, rank, names = handler.attempt_store(), group.group_rank or 0, handler.member_names()
            peers = OtherMachines(store, rank, names, self._plan.machine_timeout, handler.ask_waiting)
            handler.answer_waiting(lambda: peers.waiting)
            self._peers = peers

    def _lookouts(self, group: WorkerGroup) -> list[Lookout]:
        """Return one for each process; they are empty if the folder of this attempt cannot be written."""
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

    # --- its end

    @property
    def store_lost(self) -> bool:
        """True if the machine that held the store is gone: requests to it are not answered."""
        return self._peers.store_lost

    @property
    def preempted(self) -> bool:
        """True if every process has saved and exited on request of a scheduler."""
        return self._watch is not None and self._watch.preempted() and None not in self._watch.codes()

    @property
    def preempted_at(self) -> int | None:
        """The step at which they did; None if unknown."""
        return None if self._watch is None else self._watch.preempted_at()

    def _wait_until_all_exited(self, watch: Watch) -> None:
        """Preempted ranks agree on a step and save, so they do not exit at the same moment."""
        end = time.monotonic() + self._plan.grace
        while watch.preempted() and not self.preempted and time.monotonic() < end:
            time.sleep(0.1)
        if watch.preempted() and not self.preempted:
            self._stop_workers_now()

    def _wait_for_other_machines(self) -> None:
        """Keep the store of the main machine alive for the others, which still read it."""
        self._peers.note_ended()
        end = time.monotonic() + self._plan.grace
        while not self._peers.all_ended and not self._peers.lost() and time.monotonic() < end:
            time.sleep(0.1)
        self._peers.leave()

    def _trouble(self, watch: Watch) -> Kind | None:
        if watch.failed():
            return "failed"
        now = time.monotonic()
        if watch.ended_early():
            self._peers.note_early()
        if watch.deserted(now, self._peers.early):
            return "deserted"
        if self._plan.stall_timeout is not None and watch.stalled(self._plan.stall_timeout, now):
            return "stalled"
        if self._peers.incidents():
            return "abandoned"
        return "lost" if self._peers.lost() else None

    def _handle_failure(self, watch: Watch, kind: Kind, group: WorkerGroup) -> None:
        self._watch = None  # handled once
        incident = watch.incident(kind)
        if self._peers.store_lost or self._peers.is_final:
            self._remaining_restarts = 0
        self._peers.report(incident, final=self._remaining_restarts == 0)
        self._stop_workers_now()
        incident = self._with_others(incident, group)
        if self._peers.store_lost:
            self._remaining_restarts = 0
        self.incidents.append(incident)
        self._report(incident, group)

    def _with_others(self, incident: Incident, group: WorkerGroup) -> Incident:
        """Add the ranks of machines that report soon after; wait longer if the cause is not among its own."""
        start = time.monotonic()
        while True:
            joined = incident
            for theirs in self._peers.incidents().values():
                joined = joined.joined_with(theirs)
            joined.lost = self._peers.lost(None if joined.kind == "lost" else _SILENT_SECONDS)
            timeout = _LISTEN_SECONDS if joined.knows_its_cause else _FIND_OUT_SECONDS
            complete = len(self._peers.incidents()) + len(joined.lost) + 1 >= (group.group_world_size or 1)
            if complete or time.monotonic() - start > timeout:
                return joined
            time.sleep(0.1)

    def _report(self, incident: Incident, group: WorkerGroup) -> None:
        text = describe(incident, group.workers[0].world_size, str(self._folder))
        path = self._attempt_folder / "report.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # the temporary folder may have been cleared
            path.write_text(text + "\n", "utf-8", errors="replace")
        except OSError as error:
            text += f"\nThis report is not in a file: {error}"
        say(text)
        if self._remaining_restarts > 0:
            done = group.spec.max_restarts - self._remaining_restarts + 1
            say(f"restart {done} of {group.spec.max_restarts}")

    def _stop_workers_now(self) -> None:
        context: Any = self._pcontext
        context._close(death_sig=signal.SIGTERM, timeout=STOP_SECONDS)
