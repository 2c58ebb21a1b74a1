"""Checks of a launch before the first process starts, and the token with which the machines of a job prove that they
belong to it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.config.parallel import rows_compute, rows_training
from windlass.config.parallel import rows_launch as rows
from windlass.config.parallel.keys import Key, Settings
from windlass.core.errors import ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.logs import get_logger, warn_once
from windlass.dist.listening import can_listen, is_loopback

logger = get_logger(__name__)
TOKEN_VARIABLE = "WINDLASS_RDZV_TOKEN"
# Characters; in hex they are 64 bits, too many to be found by trying.
_LEAST_LENGTH = 16


def read_token(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The token in the file at `path`, else that of the variable; None if neither is given. Warns about a file that
    other users can read. Raises ConfigError if it cannot be read, or the token is too short to be a secret.
    """
    name, text = (TOKEN_VARIABLE, environ.get(TOKEN_VARIABLE)) if path is None else _of_file(path)
    if text is None:
        return None
    token = text.strip()
    if len(token) < _LEAST_LENGTH:
        # The value itself is a secret, and is not shown.
        fix = f"must have at least {_LEAST_LENGTH} characters; `openssl rand -hex 32` makes one"
        raise ConfigError(Problem(name, f"{len(token)} characters", fix))
    return token


def _of_file(path: str) -> tuple[str, str]:
    flag = f"--{rows.TOKEN_FILE.flags[0]}"
    try:
        with open(path, encoding="utf-8") as file:
            text, mode = file.read(), os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(flag, path, f"cannot be read: {error}")) from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        permissions = stat.S_IMODE(mode)
        advice = f"chmod 600 {shlex.quote(path)}"
        warn_once(
            logger, f"{flag}={path!r} is open to other users of this machine (mode {permissions:o}): {advice}"
        )
    return f"the token in {path}", text


def _token(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Problem]:
    if _meets_others(plan):
        try:
            read_token(plan.token_file, environ)
        except ConfigError as error:
            yield from error.problems


def _meets_others(plan: LaunchPlan) -> bool:
    return plan.engine == "local" and plan.machines > 1


def notes_without_token(address: str, token: str | None) -> list[str]:
    """Return the warning about a job whose machines meet at `address`; an empty list if it needs none."""
    if token is not None or is_loopback(address):
        return []
    return [
        f"the job has no secret: any machine that reaches {address} could join it, and read or change what it "
        f"computes. Set the same secret on every machine, as {TOKEN_VARIABLE} or in a file with "
        f"--{rows.TOKEN_FILE.flags[0]} (`openssl rand -hex 32` makes one)"
    ]


_PLACES = "it decides itself where the processes connect"
# Engine -> reason -> settings that it decides itself, which are refused with it.
_LEFT_TO_ENGINE: dict[str, dict[str, tuple[Key, ...]]] = {
    "local": {"it has no options of its own": (rows.ENGINE_OPTIONS,)},
    "slurm": {_PLACES: (rows.MACHINE_RANK, rows.MAIN_ADDRESS)},
    "ray": {
        "it distributes the processes over its cluster, and num_processes is their number": (rows.MACHINES,),
        _PLACES: (
            rows.MACHINE_RANK,
            rows.MAIN_ADDRESS,
            rows.MAIN_PORT,
            rows.RENDEZVOUS,
            rows.RENDEZVOUS_OPTIONS,
            rows.TOKEN_FILE,
        ),
        "it does not monitor the progress of its processes": (
            rows.STALL_TIMEOUT,
            rows.MACHINE_TIMEOUT,
            rows.MONITOR_INTERVAL,
        ),
        "it stores the output of its processes itself": (rows.LOG_DIR, rows.TEE, rows.ROLE),
        "it gives each process its device": (rows.DEVICES,),
        "it requests its processes to exit itself": (rows.PREEMPTION_GRACE, rows.REQUEUE),
    },
}
SLURM_JOB_VARIABLE = "SLURM_JOB_ID"
# Flags of a launch that hardly any script has of its own.
_OF_LAUNCHES = (
    "num_processes", "nproc_per_node", "num_machines", "nnodes", "machine_rank", "main_process_ip", "multi_gpu",
    "use_fsdp", "use_deepspeed",
)  # fmt: skip
_TEE = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of this machine, as the command line determines them; nothing here imports torch."""

    devices: int = 0  # number of accelerators
    device_kind: str = "cpu"  # their type ("cuda"); "cpu" if there are none
    # (precision, True for the CPU) -> why it is not available; None if it is
    lacks: Callable[[str, bool], str | None] = lambda precision, cpu: None
    # (port) -> True if a program listens on it
    port_in_use: Callable[[int], bool] = lambda port: not can_listen("", port)


def launch_problems(plan: LaunchPlan, machine: Machine, environ: Mapping[str, str]) -> Iterator[Problem]:
    yield from _script(plan)
    yield from _sizes(plan)
    yield from _multi_gpu(plan.settings)
    yield from _tee(plan)
    if plan.log_dir is not None and is_url(plan.log_dir):
        yield _problem(plan, rows.LOG_DIR, "is a URL; name a folder of this machine")
    # What another engine decides is refused also if it would do no harm: a value without an effect misleads.
    yield from _left_to_engine(plan)
    if plan.engine == "local":
        # The machines of a cluster are not this machine.
        yield from _meeting_point(plan, machine)
        yield from _devices(plan, machine)
    yield from _requeue(plan, environ)
    yield from _token(plan, environ)


def launch_notes(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what a user should know of a launch that takes place."""
    if _meets_others(plan) and plan.main_address is not None:
        yield from notes_without_token(plan.main_address, read_token(plan.token_file, environ))
    for word in plan.arguments:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag[2:].replace("-", "_") in _OF_LAUNCHES:
            yield f"{flag} is after {plan.script}, which gets it; a flag of the launch is before the script"


def _problem(plan: LaunchPlan, key: Key, fix: str) -> Problem:
    said = plan.settings.get(key.name)
    if said is None:
        return Problem(f"--{key.flags[0]}", key.default, fix)
    return Problem(said.origin, said.value, fix)


def _script(plan: LaunchPlan) -> Iterator[Problem]:
    if plan.module and plan.no_python:
        yield Problem("--no_python", True, "contradicts --module: the script is a program or a module")
    elif plan.no_python:
        if shutil.which(plan.script) is None and not os.path.isfile(plan.script):
            yield Problem("script", plan.script, "is not a program that can be found; give its path")
    elif plan.module:
        if not _is_module(plan.script):
            yield Problem(
                "script", plan.script, "is not a module that can be imported; is its folder on PYTHONPATH?"
            )
    elif not os.path.isfile(plan.script):
        fix = (
            f"is not a file in {Path.cwd()}; give the path of a script, or --module with the name of a module"
        )
        yield Problem("script", plan.script, fix)
    elif plan.script.endswith((".yaml", ".yml")):
        fix = f"is a recipe and no script: windlass launch -m windlass train {plan.script}"
        yield Problem("script", plan.script, fix)


def _is_module(name: str) -> bool:
    # Only the package: to look for a module in it would import the package, and with it much of the script.
    first = name.partition(".")[0]
    # The working directory is on the path of the script, and not always on that of the launcher.
    if os.path.isfile(f"{first}.py") or os.path.isdir(first):
        return True
    try:
        return importlib.util.find_spec(first) is not None
    except ValueError:  # "__main__" of a console script
        return False


def _sizes(plan: LaunchPlan) -> Iterator[Problem]:
    if plan.processes < 1:
        yield _problem(plan, rows.PROCESSES, "must be at least 1; give --num_processes")
    elif plan.processes % plan.machines:
        fix = f"is the number on all machines together, and {plan.machines} machines cannot share it equally"
        yield _problem(plan, rows.PROCESSES, fix)
    if plan.machine_rank >= plan.machines:
        fix = f"must lie in 0..{plan.machines - 1} for {plan.machines} machine(s)"
        yield _problem(plan, rows.MACHINE_RANK, fix)


def _multi_gpu(settings: Settings) -> Iterator[Problem]:
    flag, strategy = settings.get("launch.multi_gpu"), settings.get(rows_training.STRATEGY.name)
    if flag is not None and flag.source == "flag" and strategy is not None and strategy.value == "fsdp":
        fix = f"requests replicas of the model, and {strategy.origin} shards; leave one of the two out"
        yield Problem(flag.origin, True, fix)


def _tee(plan: LaunchPlan) -> Iterator[Problem]:
    here = plan.processes // plan.machines
    if not _TEE.fullmatch(plan.tee):
        yield _problem(plan, rows.TEE, "must be 0, 1, 2 or 3, or RANK:N pairs with commas between them")
    elif any(int(pair.partition(":")[0]) >= here for pair in plan.tee.split(",") if ":" in pair):
        yield _problem(plan, rows.TEE, f"names a rank that this machine does not have: 0..{here - 1}")


def _left_to_engine(plan: LaunchPlan) -> Iterator[Problem]:
    for reason, keys in _LEFT_TO_ENGINE.get(plan.engine, {}).items():
        for key in keys:
            if plan.settings.value(key) != key.default:
                yield _problem(
                    plan, key, f"cannot be had with the {plan.engine} engine: {reason}; leave it out"
                )


def _requeue(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Problem]:
    if plan.max_requeues is not None and not plan.requeue:
        yield _problem(plan, rows.MAX_REQUEUES, "limits --requeue, which is not set; add it")
    if plan.requeue and plan.engine == "local" and plan.machines > 1 and SLURM_JOB_VARIABLE not in environ:
        fix = "needs Slurm for several machines, whose launchers cannot restart a job by themselves; leave it out"
        yield _problem(plan, rows.REQUEUE, fix)


def _meeting_point(plan: LaunchPlan, machine: Machine) -> Iterator[Problem]:
    if plan.machines > 1:
        if plan.main_address is None:
            yield _problem(
                plan, rows.MAIN_ADDRESS, "is needed for several machines: the address of machine 0"
            )
        if not plan.main_port:
            yield _problem(plan, rows.MAIN_PORT, "is needed for several machines: a free port on machine 0")
    # Without ranks, the first machine that can listens on the port, and the others connect to it.
    listens = plan.machine_rank == 0 and (plan.machines == 1 or plan.rendezvous == "static")
    if plan.main_port and listens and machine.port_in_use(plan.main_port):
        fix = "is in use on this machine; use another, or 0 on one machine, which selects a free one"
        yield _problem(plan, rows.MAIN_PORT, fix)


def _devices(plan: LaunchPlan, machine: Machine) -> Iterator[Problem]:
    here = plan.processes // plan.machines
    cpu = plan.cpu or machine.devices == 0
    wanted = plan.devices.split(",") if plan.devices else []
    count = len(wanted) if wanted else machine.devices
    if not cpu and here > count:
        fix = f"means {here} processes on this machine, which has {count} device(s); start at most {count}, or --cpu"
        yield _problem(plan, rows.PROCESSES, fix)
    if plan.settings.value(rows.MULTI_GPU) and cpu:
        fix = "requests accelerators, and this launch has none; leave it out to run on the CPU"
        yield _problem(plan, rows.MULTI_GPU, fix)
    # Without devices, names of other kinds (such as those of drivers) are of none either.
    absent = [
        word for word in wanted if not machine.devices or (word.isdigit() and int(word) >= machine.devices)
    ]
    if absent and not plan.cpu:
        fix = f"names {', '.join(absent)}, and this machine has {machine.devices} device(s), counted from 0"
        yield _problem(plan, rows.DEVICES, fix)
    if len(set(wanted)) < len(wanted):
        yield _problem(plan, rows.DEVICES, "names a device twice; each process needs one of its own")
    precision = plan.settings.get(rows_training.PRECISION.name)
    emulated = plan.settings.value(rows_compute.FP8_EMULATE)
    reason = None if precision is None or emulated else machine.lacks(precision.value, cpu)
    if precision is not None and reason:
        yield Problem(precision.origin, precision.value, reason)
