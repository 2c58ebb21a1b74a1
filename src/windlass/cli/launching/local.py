"""The local engine: the processes of this machine, under torch's elastic agent."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler

from windlass.cli.launching.agent import OptionalLogs, WatchingAgent
from windlass.cli.launching.failure_report import EXIT_UNREACHABLE, exit_code, say
from windlass.cli.launching.launch_checks import SLURM_JOB_VARIABLE, TOKEN_VARIABLE, read_token
from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.worker import LAUNCHER_VARIABLE
from windlass.cli.launching.worker_environment import worker_environment
from windlass.core.errors import EXIT_PREEMPTED, ConfigError, Problem, refuse
from windlass.core.locations import at_home
from windlass.core.redact import redact_command, redact_value
from windlass.dist.arrivals import MeetingError
from windlass.dist.elastic import quiet_elastic
from windlass.dist.listening import can_listen
from windlass.dist.machines import meet
from windlass.dist.rendezvous import DEFAULT_WAIT_SECONDS, Meeting

_LOCALHOST = "127.0.0.1"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def run(plan: LaunchPlan) -> int:
    """Start the processes of this machine, and return when they and those of the other machines have ended.

    Returns:
        0 if every process succeeded; 75 if they saved and exited because a scheduler preempted them; else the exit
        code of the rank that failed first (128 + signal if it was killed), 124 if the job stalled, 69 if the machines
        did not meet or one was lost.
    """
    quiet_elastic()
    requeue = Requeue(plan.max_requeues, os.environ) if plan.requeue else None
    # Before the variable is removed, and once for all runs of a job that is requeued.
    token = read_token(plan.token_file, os.environ) if plan.machines > 1 else None
    os.environ.pop(TOKEN_VARIABLE, None)  # a secret that only launchers need
    try:
        while True:
            code, signalled = _run_once(plan, token)
            if code != EXIT_PREEMPTED or requeue is None:
                return code
            if not requeue.restarts_here(signalled, plan.machine_rank):
                return code
    except SignalException as stop:  # between two runs, when no process runs
        return _stopped(stop)


def _run_once(plan: LaunchPlan, token: str | None) -> tuple[int, bool]:
    """Return the exit code, and True if the launcher itself was signalled."""
    folder = _folder(plan)
    try:
        return _run_in(folder, plan, token)
    finally:
        # A job that succeeds leaves nothing behind in the temporary folder.
        if plan.log_dir is None and not any(folder.glob("attempt-*/report.txt")):
            shutil.rmtree(folder, ignore_errors=True)  # no report names it


def _run_in(folder: Path, plan: LaunchPlan, token: str | None) -> tuple[int, bool]:
    os.environ.update(worker_environment(plan))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    # Torch's launcher forwards these; some schedulers send SIGUSR1 instead of SIGTERM.
    if hasattr(signal, "SIGUSR1"):
        os.environ.setdefault(_SIGNALS_VARIABLE, "SIGTERM,SIGINT,SIGQUIT,SIGUSR1")
    meeting = _meeting(plan, token)
    try:
        agent = _agent(plan, meet(meeting), folder)
    except (MeetingError, RendezvousError) as error:
        return _unreachable(error, meeting), False
    # Torch's agent raises for a signal, returns a failed result for a failure, and both may follow an orderly exit.
    succeeded = False
    try:
        succeeded = not agent.run().is_failed()
    except SignalException as stop:
        if not agent.preempted:
            return _stopped(stop), True
    except (MeetingError, RendezvousError) as error:
        return _unreachable(error, meeting), False
    finally:
        if not agent.store_lost:
            with contextlib.suppress(Exception):  # the store may be gone with the main machine
                agent.get_worker_group().spec.rdzv_handler.shutdown()
    if agent.preempted:
        where = "" if agent.preempted_at is None else f" at step {agent.preempted_at}"
        say(f"the job saved and exited{where}, as requested, and can be restarted")
        return EXIT_PREEMPTED, agent.signalled
    if succeeded:
        return 0, False
    return exit_code(agent.incidents[-1]) if agent.incidents else 1, False


def _stopped(stop: SignalException) -> int:
    say(f"stopped by {stop.sigval.name}")
    return 128 + int(stop.sigval)


def _agent(plan: LaunchPlan, handler: RendezvousHandler, folder: Path) -> WatchingAgent:
    entrypoint, *arguments = command(plan)
    spec = WorkerSpec(
        role=plan.role,
        local_world_size=plan.processes // plan.machines,
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=plan.max_restarts,
        monitor_interval=plan.monitor_interval,
    )
    logs = OptionalLogs(log_dir=str(folder / "logs"), tee=Std.from_str(plan.tee))
    return WatchingAgent(spec, logs, folder, plan)


def command(plan: LaunchPlan) -> list[str]:
    how = ["--exec"] if plan.no_python else ["-m"] if plan.module else []
    # -P: nothing in the current folder comes before the standard library.
    worker = [sys.executable, "-u", "-P", "-m", "windlass.cli.launching.worker"]
    return [*worker, *how, plan.script, *plan.arguments]


def _meeting(plan: LaunchPlan, token: str | None = None) -> Meeting:
    run_id, wait = rendezvous_options(plan.rendezvous_options, "--rdzv_conf {}")
    if plan.machines == 1:
        return Meeting(_LOCALHOST, plan.main_port or 0, 1, 0, True, uuid.uuid4().hex, wait)
    address, port = plan.main_address or _LOCALHOST, plan.main_port or 29500
    if plan.rendezvous == "static":
        rank, hosts = plan.machine_rank, plan.machine_rank == 0
    else:
        rank, hosts = None, can_listen(address, port)
    return Meeting(address, port, plan.machines, rank, hosts, run_id, wait, token)


def rendezvous_options(options: Mapping[str, Any], field: str) -> tuple[str, int]:
    """Return the name of the job, and the seconds that machines wait for each other: `timeout` of torch's static
    rendezvous, `join_timeout` of its c10d. Raises ConfigError for other options of theirs.

    Args:
        field: how errors call an option, with `{}` in place of its name.
    """
    waits = ("timeout", "join_timeout")
    unused = (
        "is an option of torch's rendezvous, which is not used; id, timeout and join_timeout are the options"
    )
    refuse(
        Problem(field.format(name), value, "must be a whole number of seconds" if name in waits else unused)
        for name, value in options.items()
        if name != "id" and not (name in waits and str(value).isdecimal())
    )
    seconds = [int(value) for name, value in options.items() if name in waits]
    return str(options.get("id", "windlass")), max(seconds, default=DEFAULT_WAIT_SECONDS)


def _folder(plan: LaunchPlan) -> Path:
    """Make a new folder for the files of one run of the job. Raises ConfigError if that is not possible."""
    try:
        if plan.log_dir is None:
            return Path(tempfile.mkdtemp(prefix="windlass-launch-"))
        # Absolute, because the processes write into it, and a script may change its working directory.
        parent = at_home(plan.log_dir).absolute()
        return _new_folder(parent, f"{socket.gethostname()}-{os.getpid()}")
    except OSError as error:
        fix = f"cannot hold the files of the processes ({error}); name a folder that can be written"
        raise ConfigError(Problem("--log_dir", plan.log_dir, fix)) from error


def _new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or `name-2` and so on: a job that is requeued has the same process, and the launcher of a
    container that is started again often the same host name and id. Marks that were left there would be taken for those
    of this run.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _unreachable(error: Exception, meeting: Meeting) -> int:
    text = str(error)
    if not isinstance(error, MeetingError):
        # Torch's own error only says that there is a cause.
        reason = str(error.__cause__ or error).strip().rstrip(".") or "the machines did not meet"
        text = (
            f"{type(error).__name__}: {reason}. {meeting.machines} machines must start "
            f"`windlass launch` with the same address and port within {meeting.wait_seconds} s"
        )
    say(f"no job over {meeting.address}:{meeting.port}: {text}")
    return EXIT_UNREACHABLE


def show(plan: LaunchPlan) -> str:
    """Return the number of processes, what each would run, and the variables set for it."""
    environ = sorted(worker_environment(plan).items())
    variables = [f"{key}={shlex.quote(redact_value(key, value))}" for key, value in environ]
    here = plan.processes // plan.machines
    about = [f"# {here} process(es) on this machine, {plan.processes} in all, {plan.max_restarts} restart(s)"]
    if plan.machines > 1:
        meeting = _meeting(plan)
        about.append(
            f"# machine {plan.machine_rank} of {plan.machines}, which meet at {meeting.address}:{meeting.port}"
        )
    return "\n".join([*about, *variables, shlex.join(redact_command(command(plan)))])


# How often Slurm has restarted this job; not set in the first run.
_COUNT_VARIABLE = "SLURM_RESTART_COUNT"
_TIMEOUT_SECONDS = 60


class Requeue:
    """Restarts a job: through Slurm's queue if the job came from one, else in place. `limit`: of restarts, if any."""

    def __init__(self, limit: int | None, environ: Mapping[str, str]) -> None:
        self._limit = limit
        self._job = environ.get(SLURM_JOB_VARIABLE)
        count = environ.get(_COUNT_VARIABLE, "")
        self._done = int(count) if self._job is not None and count.isdecimal() else 0

    def restarts_here(self, signalled: bool, machine_rank: int = 0) -> bool:
        """Return True if the launcher is to restart the job itself, now.

        False under Slurm, where machine 0 puts the job back into the queue, and if the launcher itself was signalled:
        the sender wants it gone, and receives the exit code.
        """
        if machine_rank != 0 or (self._job is None and signalled):
            return False
        if self._limit is not None and self._done >= self._limit:
            say(f"the job has been restarted {self._done} time(s), the maximum of --max_requeues")
            return False
        if self._job is not None:
            _put_back(self._job)
            return False
        self._done += 1
        say(f"restarting the job ({self._done}{'' if self._limit is None else f' of {self._limit}'})")
        return True


def _put_back(job: str) -> None:
    """Ask Slurm to queue the job again; a refusal is reported and nothing else."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    say(f"job {job} is queued again" if problem is None else f"{' '.join(command)} failed: {problem}")
