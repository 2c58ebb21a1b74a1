"""The Ray engine: Ray Train places one worker for each rank, and each runs the script in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.launching.failure_report import Incident, describe, exit_code, say
from windlass.cli.launching.local import command
from windlass.cli.launching.portable import from_text, to_text
from windlass.cli.launching.watch import Watch, Watched
from windlass.cli.launching.worker_environment import worker_environment
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import require
from windlass.core.redact import redact_command
from windlass.dist.beacon import FOLDER_VARIABLE, Lookout

if TYPE_CHECKING:
    from windlass.config.launch import LaunchPlan

# Options of the engine: where the cluster is (none: the one in RAY_ADDRESS, else one on this machine), where Ray keeps
# its results, and what a worker takes.
_OPTIONS = ("address", "storage_path", "resources_per_worker", "name")
# Ray ends the job with the first error that it sees: ranks that only lost another let that one speak before them.
_AFTER_THE_CAUSE = 5.0
# Between the words that Ray puts around an error, the account of a rank stands behind this.
_MARKER = "windlass incident: "


def run_ray(plan: LaunchPlan) -> int:
    """Run the job on a Ray cluster and stay until it has ended."""
    job = describe_ray(plan)
    ray, train = require("ray", "launch on Ray"), require("ray.train", "launch on Ray")
    started = not ray.is_initialized()
    if started:
        ray.init(address=job["address"], log_to_driver=True)
    try:
        trainer = require("ray.train.v2.api.data_parallel_trainer", "launch on Ray").DataParallelTrainer(
            run_rank,
            train_loop_config={"plan": to_text(plan), "folder": os.getcwd()},
            scaling_config=train.ScalingConfig(**job["scaling"]),
            run_config=train.RunConfig(
                failure_config=train.FailureConfig(max_failures=plan.max_restarts), **job["run"]
            ),
        )
        trainer.fit()
    except train.TrainingFailedError as error:
        return _report(error, plan.processes)
    finally:
        if started:
            ray.shutdown()
    return 0


def describe_ray(plan: LaunchPlan) -> dict[str, Any]:
    """The job as Ray Train gets it, as plain values."""
    unknown = [key for key in plan.engine_options if key not in _OPTIONS]
    if unknown:
        fix = f"is not an option of the Ray engine; it has {', '.join(_OPTIONS)}"
        raise ConfigError(
            [Problem(f"engine_options.{key}", plan.engine_options[key], fix) for key in unknown]
        )
    options = dict(plan.engine_options)
    resources = options.get("resources_per_worker") or {"CPU": 1}
    return {
        "address": options.get("address"),
        "command": redact_command(command(plan)),
        "scaling": {
            "num_workers": plan.processes,
            "use_gpu": not plan.cpu,
            "resources_per_worker": resources,
        },
        "run": {"name": options.get("name"), "storage_path": options.get("storage_path")},
        "max_failures": plan.max_restarts,
    }


def print_ray(plan: LaunchPlan) -> str:
    """The job as text."""
    return json.dumps(describe_ray(plan), indent=2)


class RankFailedError(RuntimeError):
    """A rank ended badly; the message carries its account."""


def run_rank(config: dict[str, Any]) -> None:
    """What a Ray worker runs: the script, in a process that finds what any launcher would have set."""
    plan = from_text(config["plan"])
    context = require("ray.train", "run under Ray").get_context()
    folder = Path(tempfile.mkdtemp(prefix="windlass-ray-"))
    environ = {**os.environ, **worker_environment(plan), **_place(context, folder)}
    where = (
        config["folder"] if os.path.isdir(config["folder"]) else None
    )  # Ray starts its workers in a folder of its own
    process = subprocess.Popen(command(plan), env=environ, cwd=where)
    if process.wait() == 0:
        return
    rank, machine = context.get_world_rank(), context.get_node_rank()
    watched = Watched(
        rank, process.pid, process.poll, environ["TORCHELASTIC_ERROR_FILE"], Lookout(folder, rank)
    )
    account = Watch(machine, [watched]).incident("failed")
    if account.ranks[0].lost_its_peers:
        time.sleep(_AFTER_THE_CAUSE)
    raise RankFailedError(_MARKER + json.dumps(account.to_json()))


def _place(context: Any, folder: Path) -> dict[str, str]:
    """Where this worker stands, in the variables of torch's launcher. Rank 0 chooses where all meet."""
    rank = context.get_world_rank()
    collective = require("ray.train.collective", "run under Ray")
    address, port = collective.broadcast_from_rank_zero(_own_place() if rank == 0 else None)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        FOLDER_VARIABLE: str(folder),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }


def _own_place() -> tuple[str, int]:
    address = require("ray.util", "run under Ray").get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


def _report(error: Exception, world: int) -> int:
    """Say what failed, from the accounts of the ranks."""
    failures = getattr(error, "worker_failures", {})
    accounts = [_account(str(failure)) for failure in failures.values()]
    incident = Incident("failed", [rank for account in accounts if account for rank in account.ranks])
    if not incident.ranks:
        say(f"Ray could not run the job: {error}")
        return 1
    say(describe(incident, world, "on the machines of the cluster"))
    return exit_code(incident)


def _account(text: str) -> Incident | None:
    _, found, rest = text.partition(_MARKER)
    if not found:
        return None
    content, _ = json.JSONDecoder().raw_decode(rest)
    return Incident.from_json(content)
