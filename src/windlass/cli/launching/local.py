"""The local engine: the processes of this machine, under torch's elastic agent."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler

from windlass.cli.launching.agent import OptionalLogs, Patience, WatchingAgent
from windlass.cli.launching.failure_report import EXIT_UNREACHABLE, exit_code, say
from windlass.cli.launching.requeue import Requeue
from windlass.cli.launching.worker import LAUNCHER_VARIABLE
from windlass.cli.launching.worker_environment import worker_environment
from windlass.config.launch_token import read_token
from windlass.core.errors import EXIT_PREEMPTED, ConfigError, Problem
from windlass.core.redact import redact_command, redact_value
from windlass.dist.elastic import quiet_elastic
from windlass.dist.listening import can_listen
from windlass.dist.machines import DEFAULT_WAIT_SECONDS, Meeting, meet
from windlass.dist.rendezvous import MeetingError

if TYPE_CHECKING:
    from windlass.config.launch import LaunchPlan

_LOCALHOST = "127.0.0.1"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def run_local(plan: LaunchPlan) -> int:
    """Start the processes of this machine and stay until they, and those of the other machines, have ended.

    Returns:
        0 when every process ended well; 75 when they left because a scheduler asked them or the launcher to; else the
        exit code of the rank that failed first (128 + signal when it was killed), 124 when the job stood still, 69 when
        the machines did not meet or one was lost.
    """
    quiet_elastic()
    requeue = Requeue(plan.max_requeues) if plan.requeue else None
    try:
        while True:
            code, told = _run_once(plan)
            if code != EXIT_PREEMPTED or requeue is None or not requeue.starts_here(told, plan.machine_rank):
                return code
    except SignalException as stop:  # between two runs: nobody is there to be told
        return _stopped(stop)


def _run_once(plan: LaunchPlan) -> tuple[int, bool]:
    """The exit code, and whether the launcher itself was told to stop."""
    folder = _folder(plan)
    try:
        return _run_in(folder, plan)
    finally:
        if plan.log_dir is None and not any(folder.glob("attempt-*/report.txt")):
            shutil.rmtree(folder, ignore_errors=True)  # no report names it


def _run_in(folder: Path, plan: LaunchPlan) -> tuple[int, bool]:
    os.environ.update(worker_environment(plan))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    # Torch's launcher hands on what it knows; SIGUSR1 is for the schedulers that send it instead of SIGTERM.
    if hasattr(signal, "SIGUSR1"):
        os.environ.setdefault(_SIGNALS_VARIABLE, "SIGTERM,SIGINT,SIGQUIT,SIGUSR1")
    meeting = _meeting(plan)
    try:
        agent = _agent(plan, meet(meeting), folder)
    except (MeetingError, RendezvousError) as error:
        return _unreachable(error, meeting), False
    try:
        result = agent.run()
    except SignalException as stop:
        if not agent.has_left:
            return _stopped(stop), True
        result = None
    except (MeetingError, RendezvousError) as error:
        return _unreachable(error, meeting), False
    finally:
        _close(agent)
    if agent.has_left:
        where = "" if agent.left_at is None else f" at step {agent.left_at}"
        say(f"the job left{where}, as it was told to, and can be started again")
        return EXIT_PREEMPTED, agent.told
    return _code(agent, result), False


def _stopped(stop: SignalException) -> int:
    say(f"stopped by {stop.sigval.name}")
    return 128 + int(stop.sigval)


def _agent(plan: LaunchPlan, handler: RendezvousHandler, folder: Path) -> WatchingAgent:
    spec = WorkerSpec(
        role=plan.role,
        local_world_size=plan.processes // plan.machines,
        entrypoint=command(plan)[0],
        args=tuple(command(plan)[1:]),
        rdzv_handler=handler,
        max_restarts=plan.max_restarts,
        monitor_interval=plan.monitor_interval,
    )
    logs = OptionalLogs(log_dir=str(folder / "logs"), tee=Std.from_str(plan.tee))
    return WatchingAgent(
        spec, logs, folder, Patience(plan.stall_timeout, plan.grace, plan.machine_timeout), "[rank ${rank}]: "
    )


def command(plan: LaunchPlan) -> list[str]:
    """What each process runs."""
    how = ["--exec"] if plan.no_python else ["-m"] if plan.module else []
    return [sys.executable, "-u", "-m", "windlass.cli.launching.worker", *how, plan.script, *plan.arguments]


def _meeting(plan: LaunchPlan) -> Meeting:
    options = dict(plan.rendezvous_options)
    run_id, wait = str(options.pop("id", "windlass")), _wait(options)
    if options:
        fix = "is an option of torch's rendezvous, which is not used; id, timeout and join_timeout are the options"
        raise ConfigError([Problem(f"--rdzv_conf {name}", value, fix) for name, value in options.items()])
    if plan.machines == 1:
        port = plan.main_port or 0
        return Meeting(_LOCALHOST, port, 1, 0, True, uuid.uuid4().hex, wait)
    address, port = plan.main_address or _LOCALHOST, plan.main_port or 29500
    if plan.rendezvous == "static":
        rank, hosts = plan.machine_rank, plan.machine_rank == 0
    else:
        rank, hosts = None, can_listen(address, port)
    token = read_token(plan.token_file, os.environ)
    return Meeting(address, port, plan.machines, rank, hosts, run_id, wait, token)


def _wait(options: dict[str, Any]) -> int:
    """Seconds that machines wait for each other: `timeout` of torch's static rendezvous, `join_timeout` of c10d."""
    said = {name: options.pop(name) for name in ("timeout", "join_timeout") if name in options}
    wrong = [name for name, value in said.items() if not str(value).isdecimal()]
    if wrong:
        raise ConfigError(
            [
                Problem(f"--rdzv_conf {name}", said[name], "must be a whole number of seconds")
                for name in wrong
            ]
        )
    return max(map(int, said.values()), default=DEFAULT_WAIT_SECONDS)


def _folder(plan: LaunchPlan) -> Path:
    try:
        if plan.log_dir is None:
            return Path(tempfile.mkdtemp(prefix="windlass-launch-"))
        path = Path(plan.log_dir) / f"{socket.gethostname()}-{os.getpid()}"
        path.mkdir(parents=True, exist_ok=True)
        return path
    except OSError as error:
        fix = f"cannot hold the files of the processes ({error}); name a folder that can be written"
        raise ConfigError([Problem("--log_dir", plan.log_dir or tempfile.gettempdir(), fix)]) from error


def _unreachable(error: Exception, meeting: Meeting) -> int:
    where = f"{meeting.address}:{meeting.port}"
    text = str(error) if isinstance(error, MeetingError) else _why(error, meeting)
    say(f"no job over {where}: {text}")
    return EXIT_UNREACHABLE


def _why(error: Exception, meeting: Meeting) -> str:
    # Torch's own error only says that there is a cause.
    reason = str(error.__cause__ or error).strip().rstrip(".") or "the machines did not meet"
    return (
        f"{type(error).__name__}: {reason}. {meeting.machines} machines must start "
        f"`windlass launch` with the same address and port within {meeting.wait_seconds} s"
    )


def _code(agent: WatchingAgent, result: RunResult | None) -> int:
    if result is None or result.is_failed():
        return exit_code(agent.incidents[-1]) if agent.incidents else 1
    return 0


def _close(agent: WatchingAgent) -> None:
    if agent.store_lost:
        return
    with contextlib.suppress(
        Exception
    ):  # the store may be gone with the main machine: there is nothing left to close
        agent.get_worker_group().spec.rdzv_handler.shutdown()


def print_local(plan: LaunchPlan) -> str:
    """How many processes there would be, what each would run, and the variables set for it."""
    variables = [
        f"{key}={shlex.quote(redact_value(key, value))}"
        for key, value in sorted(worker_environment(plan).items())
    ]
    here = plan.processes // plan.machines
    about = [f"# {here} process(es) on this machine, {plan.processes} in all, {plan.max_restarts} restart(s)"]
    if plan.machines > 1:
        meeting = _meeting(plan)
        about.append(
            f"# machine {plan.machine_rank} of {plan.machines}, which meet at {meeting.address}:{meeting.port}"
        )
    return "\n".join([*about, *variables, shlex.join(redact_command(command(plan)))])
