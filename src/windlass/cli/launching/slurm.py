"""The Slurm engine: one task on each machine, submitted with submitit, which runs the local engine there."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from windlass.cli.launching.launch_checks import read_token
from windlass.cli.launching.launch_plan import LaunchPlan, from_text, to_text
from windlass.config import kinds
from windlass.config.parallel import rows_launch as rows
from windlass.config.values import members, type_fault
from windlass.core.errors import ConfigError, Problem, refuse, unknown
from windlass.core.optional import require
from windlass.core.output import say

# Options of this engine; all others are those of submitit's SlurmExecutor ("partition", "account", "gpus_per_node",
# ...) and AutoExecutor ("timeout_min", "mem_gb").
_OWN = {"folder": "windlass-jobs", "cluster": "slurm", "wait": False}
# "local" runs the job on this machine, for a trial.
_CLUSTERS = ("slurm", "local")
# Submitit asks Slurm for five minutes unless told otherwise; without a limit, that of the partition holds. Its local
# executor, which needs one, gets a year.
_NO_LIMIT: dict[str, dict[str, Any]] = {"slurm": {"time": None}, "local": {"timeout_min": 365 * 24 * 60}}
_LISTS = ("setup", "teardown", "srun_args")
_LIMITS = {"slurm": frozenset({"time", "timeout_min"}), "local": frozenset({"timeout_min"})}
# The port of a job follows from its number, so that jobs on one machine do not meet. Below 32768, from where on Linux
# picks the ports of connections.
_FIRST_PORT, _PORTS = 20000, 10000


class NodeJob:
    """The task of one machine. Slurm restarts it from the beginning after a preemption."""

    def __init__(self, plan: str, folder: str) -> None:
        self.plan = plan
        self.folder = folder

    def __call__(self) -> int:
        """Run this machine's processes; the task fails if they fail, so that Slurm is informed."""
        from windlass.cli.launching import local

        here = _submitit().JobEnvironment()
        number = int("".join(letter for letter in here.raw_job_id if letter.isdigit()) or 0)
        code = local.run(plan_of_node(from_text(self.plan), int(here.node), list(here.hostnames), number))
        _code_file(self.folder, here.job_id, int(here.node)).write_text(str(code))
        # Submitit takes a task that returns for one that succeeded.
        if code:
            raise SystemExit(code)
        return code

    def checkpoint(self, *_: Any) -> Any:
        """Return the same job, which resumes by itself; called by submitit before a preemption."""
        return _submitit().helpers.DelayedSubmission(self)


def run(plan: LaunchPlan) -> int:
    """Submit the job; return 0 at once, or with `wait` its exit code when it has ended."""
    options, parameters = _options(plan)
    missing = [name for name in ("srun", "sbatch") if shutil.which(name) is None]
    if options["cluster"] == "slurm" and missing:
        fix = f"needs {missing[0]} on PATH: start it on a login node of Slurm, or add --engine_options cluster=local"
        raise ConfigError(Problem(f"--{rows.ENGINE.flags[0]}", "slurm", fix))
    folder, shared = options["folder"], _shared_parameters()
    python = {f"{options['cluster']}_python": _python()}
    executor = _submitit().AutoExecutor(folder=folder, cluster=options["cluster"], **python)
    # Parameters of Slurm alone have its name as a prefix: submitit's other executors ignore those.
    names = {key: key if key in shared else f"slurm_{key}" for key in parameters}
    executor.update_parameters(**{names[key]: value for key, value in parameters.items()})
    # `update_parameters` leaves out what is None, and with it the wish for no limit.
    executor.parameters.update({key: None for key, value in parameters.items() if value is None})
    try:
        if plan.machines > 1 and read_token(plan.token_file, os.environ) is None:
            plan = dataclasses.replace(plan, token_file=_token_file(folder))
        job = executor.submit(NodeJob(to_text(plan), folder))
    except OSError as error:
        fix = f"cannot hold the files of the job ({error}); name a folder that can be written"
        raise ConfigError(Problem("engine_options.folder", folder, fix)) from error
    except require("submitit.core.utils", "launch on Slurm").FailedJobError as error:
        fix = f"Slurm did not take the job: {' '.join(str(error).split())}"
        raise ConfigError(Problem("engine_options", dict(plan.engine_options), fix)) from error
    say(f"windlass launch: job {job.job_id}; its files are in {folder}")
    if not options["wait"] and options["cluster"] == "slurm":
        return 0
    job.wait()
    say(job.stdout() or "", end="")
    say(job.stderr() or "", end="", error=True)
    return max(_code_of(folder, job.job_id, node) for node in range(plan.machines))


def show(plan: LaunchPlan) -> str:
    """Return the batch file that would be submitted."""
    options, parameters = _options(plan)
    slurm = _submitit_slurm()
    same = slurm.SlurmExecutor._equivalence_dict()
    if "mem_gb" in parameters:  # and not `mem`, which has a unit of its own
        parameters["mem_gb"] = slurm._convert_mem(parameters["mem_gb"])
    parameters = {same.get(key, key): value for key, value in parameters.items()}
    command = f"{_python()} -u -m submitit.core._submit {shlex.quote(options['folder'])}"
    return str(slurm._make_sbatch_string(command=command, folder=options["folder"], **parameters))


def _python() -> str:
    """Return the interpreter of a job, which imports nothing from the folder in which the job was submitted."""
    return shlex.join([sys.executable, "-P"])


def plan_of_node(plan: LaunchPlan, node: int, hosts: list[str], job: int) -> LaunchPlan:
    """Return the plan of machine `node` of job number `job`; the first host is the main machine."""
    port = plan.main_port or _FIRST_PORT + job % _PORTS
    return dataclasses.replace(
        plan, engine="local", machine_rank=node, main_address=hosts[0], main_port=port, engine_options={}
    )


def _options(plan: LaunchPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of this engine, and the parameters of submitit."""
    values = _typed(plan.engine_options)
    refuse(_problems(values))
    given = {**_OWN, **values}
    own = {key: given.pop(key) for key in _OWN}
    if own["cluster"] == "local" and plan.machines > 1:
        fix = "runs the job on this machine alone: leave --num_machines out"
        raise ConfigError(Problem("engine_options.cluster", "local", fix))
    given = {key: value for key, value in given.items() if key not in _LIMITS["slurm"] or value is not None}
    parameters = {
        "name": Path(plan.script).stem,
        "nodes": plan.machines,
        "tasks_per_node": 1,
        **({} if plan.cpu else {"gpus_per_node": plan.processes // plan.machines}),
        **({} if given.keys() & _LIMITS[own["cluster"]] else _NO_LIMIT[own["cluster"]]),
        **given,
        **(_notice(plan, given) if plan.requeue else {}),
    }
    return {**own, "folder": str(Path(own["folder"]).resolve())}, parameters


def _notice(plan: LaunchPlan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Let Slurm signal a preemption while there is time to save, and queue the job again."""
    signal = {"signal": f"USR1@{plan.grace}", "requeue": True}
    # Submitit handles a signal of its own until the launcher does.
    listen = "export SUBMITIT_PREEMPT_SIGNAL=USR1"
    return {
        "additional_parameters": {**signal, **(given.get("additional_parameters") or {})},
        "setup": [listen, *(given.get("setup") or [])],
    }


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the text of flags in the types that submitit declares."""
    types = {name: members(hint) for name, hint in _declared().items()}
    typed = {
        # Of a truth value or a text, `false` is the former.
        name: kinds.from_text(value, (bool,) if bool in types.get(name, ()) else types.get(name, (Any,)))
        for name, value in options.items()
    }
    return typed | {name: kinds.as_list(typed[name]) for name in _LISTS if name in typed}


def _declared() -> dict[str, Any]:
    """The types of options. The first ones are checked by submitit, with an assertion."""
    return {
        **get_type_hints(_submitit_slurm()._make_sbatch_string),
        **_submitit().AutoExecutor._typed_parameters(),
        "wait": bool,
    }


def _problems(options: Mapping[str, Any]) -> list[Problem]:
    slurm = _submitit().SlurmExecutor._valid_parameters()
    known = sorted({*_OWN, *_shared_parameters(), *slurm} - {"nodes", "tasks_per_node"})
    what = "is not an option of the Slurm engine"
    problems = unknown(options, known, "engine_options.{}".format, what)
    cluster = options.get("cluster", "slurm")
    if cluster not in _CLUSTERS:
        problems.append(Problem("engine_options.cluster", cluster, f"must be one of {', '.join(_CLUSTERS)}"))
    checked = {**_submitit().AutoExecutor._typed_parameters(), "wait": bool, "additional_parameters": dict}
    for name, value in options.items():
        if name in checked and value is not None and (fault := type_fault(value, (checked[name],))):
            problems.append(Problem(f"engine_options.{name}", value, fault))
    return problems


def _shared_parameters() -> set[str]:
    return set(_submitit().AutoExecutor._valid_parameters())


def _code_file(folder: str, job: str, node: int) -> Path:
    return Path(folder) / f"{job}_{node}.code"


def _token_file(folder: str) -> str:
    """Write a new token for this job, readable by its owner only."""
    path = Path(folder) / f"{uuid.uuid4().hex}.token"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its mode from the beginning: with `chmod` afterwards another user could have opened it before.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return str(path)


def _code_of(folder: str, job: str, node: int) -> int:
    """Return the exit code of a machine; 1 if it was taken away before it wrote one."""
    try:
        return int(_code_file(folder, job, node).read_text())
    except (OSError, ValueError):
        return 1


def _submitit() -> Any:
    return require("submitit", "launch on Slurm")


def _submitit_slurm() -> Any:
    return require("submitit.slurm.slurm", "write jobs for Slurm")
