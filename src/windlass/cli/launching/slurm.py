"""The Slurm engine: one task on each machine, which runs the local engine there. Submitted with submitit."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.launching.portable import from_text, to_text
from windlass.config.launch_token import read_token
from windlass.config.nearest import nearest
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import require
from windlass.core.output import say

if TYPE_CHECKING:
    from windlass.config.launch import LaunchPlan

# Options of the engine itself; all others are submitit's, named as in its SlurmExecutor ("partition", "account",
# "gpus_per_node", ...) or its AutoExecutor ("timeout_min", "mem_gb").
_OWN = {"folder": "windlass-jobs", "cluster": "slurm", "wait": False}
# "local" runs the job on this machine, to try it out.
_CLUSTERS = ("slurm", "local")
_FIRST_PORT, _PORTS = 20000, 10000


class NodeJob:
    """What one machine of the job runs. Slurm starts it again, from the start, when it takes the machine away."""

    def __init__(self, plan: str, folder: str) -> None:
        self.plan = plan
        self.folder = folder

    def __call__(self) -> int:
        """Run this machine's processes; fails the task when they fail, so that Slurm knows."""
        from windlass.cli.launching.local import run_local

        here = _submitit().JobEnvironment()
        plan = plan_of_node(
            from_text(self.plan), int(here.node), list(here.hostnames), _number(here.raw_job_id)
        )
        code = run_local(plan)
        _code_file(self.folder, here.job_id, int(here.node)).write_text(str(code))
        if code:
            raise SystemExit(code)
        return code

    def checkpoint(self, *_: Any) -> Any:
        """What submitit runs before the machine is taken away: the same job again, which resumes by itself."""
        return _submitit().helpers.DelayedSubmission(self)


def run_slurm(plan: LaunchPlan) -> int:
    """Submit the job; returns at once, or with `wait` when it has ended, with its exit code."""
    options = _options(plan)
    executor = _submitit().AutoExecutor(folder=options.folder, cluster=options.cluster)
    executor.update_parameters(**_for_auto_executor(options.parameters))
    if plan.machines > 1 and read_token(plan.token_file, os.environ) is None:
        plan = dataclasses.replace(plan, token_file=_token_file(options.folder))
    job = executor.submit(NodeJob(to_text(plan), options.folder))
    say(f"windlass launch: job {job.job_id}; its files are in {options.folder}")
    if not options.wait:
        return 0
    job.wait()
    say(job.stdout() or "", end="")
    say(job.stderr() or "", end="", error=True)
    return max(_code_of(options.folder, job.job_id, node) for node in range(plan.machines))


def print_slurm(plan: LaunchPlan) -> str:
    """The batch file that Slurm would get."""
    options = _options(plan)
    slurm = require("submitit.slurm.slurm", "write jobs for Slurm")
    same = slurm.SlurmExecutor._equivalence_dict()
    parameters = {same.get(key, key): value for key, value in options.parameters.items()}
    if "mem" in parameters:
        parameters["mem"] = slurm._convert_mem(float(parameters["mem"]))
    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", options.folder])
    return str(slurm._make_sbatch_string(command=command, folder=options.folder, **parameters))


def plan_of_node(plan: LaunchPlan, node: int, hosts: list[str], job: int) -> LaunchPlan:
    """The plan as machine `node` of job number `job` runs it; the first host is the main machine."""
    port = plan.main_port or _FIRST_PORT + job % _PORTS
    return dataclasses.replace(
        plan, engine="local", machine_rank=node, main_address=hosts[0], main_port=port, engine_options={}
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    folder: str
    cluster: str
    wait: bool
    parameters: dict[str, Any]


def _options(plan: LaunchPlan) -> _Options:
    given = {**_OWN, **plan.engine_options}
    if problems := _problems(plan.engine_options):
        raise ConfigError(problems)
    each = plan.processes // plan.machines
    parameters = {
        "name": Path(plan.script).stem,
        "nodes": plan.machines,
        "tasks_per_node": 1,
        **({} if plan.cpu else {"gpus_per_node": each}),
        **{key: value for key, value in given.items() if key not in _OWN},
        **(_notice(plan, given) if plan.requeue else {}),
    }
    wait = bool(given["wait"]) or given["cluster"] != "slurm"
    return _Options(str(Path(given["folder"]).resolve()), str(given["cluster"]), wait, parameters)


def _notice(plan: LaunchPlan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Slurm says that it takes the machines back while there is time to save, and may queue the job again."""
    signal = {"signal": f"USR1@{plan.grace}", "requeue": True}
    # Submitit listens for a signal of its own until the launcher takes it.
    listen = "export SUBMITIT_PREEMPT_SIGNAL=USR1"
    return {
        "additional_parameters": {**signal, **(given.get("additional_parameters") or {})},
        "setup": [listen, *(given.get("setup") or [])],
    }


def _problems(options: Mapping[str, Any]) -> list[Problem]:
    known = {*_OWN, *_shared_parameters(), *_slurm_parameters()} - {"nodes", "tasks_per_node"}
    problems = [
        Problem(f"engine_options.{key}", value, _unknown(key, known))
        for key, value in options.items()
        if key not in known
    ]
    cluster = options.get("cluster", "slurm")
    if cluster not in _CLUSTERS:
        problems.append(Problem("engine_options.cluster", cluster, f"must be one of {', '.join(_CLUSTERS)}"))
    return problems


def _unknown(key: str, known: set[str]) -> str:
    close = nearest(key, sorted(known))
    return f"is not an option of the Slurm engine{f'; did you mean {close}?' if close else ''}"


def _shared_parameters() -> set[str]:
    return set(_submitit().AutoExecutor._valid_parameters())


def _slurm_parameters() -> set[str]:
    return set(_submitit().SlurmExecutor._valid_parameters())


def _for_auto_executor(parameters: dict[str, Any]) -> dict[str, Any]:
    """Names that only Slurm knows carry its name: submitit leaves them aside on its other executors."""
    shared = _shared_parameters()
    return {key if key in shared else f"slurm_{key}": value for key, value in parameters.items()}


def _code_file(folder: str, job: str, node: int) -> Path:
    return Path(folder) / f"{job}_{node}.code"


def _token_file(folder: str) -> str:
    """A new secret of this job, readable by its owner only."""
    path = Path(folder) / f"{uuid.uuid4().hex}.token"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return str(path)


def _code_of(folder: str, job: str, node: int) -> int:
    """The exit code of a machine; 1 for one that was taken away before it could say."""
    try:
        return int(_code_file(folder, job, node).read_text())
    except (OSError, ValueError):
        return 1


def _number(job_id: str) -> int:
    return int("".join(letter for letter in job_id if letter.isdigit()) or 0)


def _submitit() -> Any:
    return require("submitit", "launch on Slurm")
