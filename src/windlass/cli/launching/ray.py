"""The Ray engine: Ray Train places one worker for each rank, and each runs the script in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from windlass.cli.launching.failure_report import Incident, Watch, Watched, describe, exit_code, say
from windlass.cli.launching.launch_checks import TOKEN_VARIABLE
from windlass.cli.launching.launch_plan import LaunchPlan, from_text, to_text
from windlass.cli.launching.local import command
from windlass.cli.launching.worker_environment import worker_environment
from windlass.config.kinds import document
from windlass.core.errors import ConfigError, Problem, first_line, refuse, unknown
from windlass.core.optional import require
from windlass.core.redact import redact_command
from windlass.core.world import World
from windlass.dist.beacon import FOLDER_VARIABLE, Lookout
from windlass.dist.listening import free_port

# The address of the cluster (by default that in RAY_ADDRESS, else a cluster on this machine), the folder of Ray's
# results, and the resources of a worker.
_OPTIONS = ("address", "storage_path", "resources_per_worker", "name")
# Ray ends the job with the first error that it receives: ranks that only lost their peers delay theirs.
_AFTER_THE_CAUSE = 5.0
# Precedes the incident of a rank in the text of Ray's error.
_MARKER = "windlass incident: "


def run(plan: LaunchPlan) -> int:
    """Run the job on a Ray cluster, and return its exit code when it has ended."""
    job = describe_ray(plan)
    ray, train = require("ray", "launch on Ray"), require("ray.train", "launch on Ray")
    started = not ray.is_initialized()
    if started:
        _start(ray, job["address"])
    try:
        trainer = require("ray.train.v2.api.data_parallel_trainer", "launch on Ray").DataParallelTrainer(
            run_rank,
            train_loop_config={"plan": to_text(plan), "folder": os.getcwd()},
            backend_config=_devices_in_common(),
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


def _start(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        fix = f"no cluster of Ray is there: {first_line(error)}"
        raise ConfigError(Problem("engine_options.address", address, fix)) from error


def _devices_in_common() -> Any:
    """Let each process see the GPUs of all on its machine, of which LOCAL_RANK names its own. By itself Ray shows each
    one only.
    """
    backend: Any = require("ray.train.backend", "launch on Ray")

    class Backend(backend.Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True

    class Config(backend.BackendConfig):  # type: ignore[misc]
        backend_cls = Backend

    return Config()


def describe_ray(plan: LaunchPlan) -> dict[str, Any]:
    """Return the job as passed to Ray Train, as plain values."""
    what = f"is not an option of the Ray engine; it has {', '.join(_OPTIONS)}"
    refuse(unknown(plan.engine_options, _OPTIONS, "engine_options.{}".format, what))
    options = dict(plan.engine_options)
    resources = options.get("resources_per_worker")
    try:
        resources = document(resources) or {"CPU": 1}
    except ValueError as error:
        raise ConfigError(Problem("engine_options.resources_per_worker", resources, str(error))) from None
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


def show(plan: LaunchPlan) -> str:
    return json.dumps(describe_ray(plan), indent=2)


class RankFailedError(RuntimeError):
    """A rank failed; the message carries its incident."""


def run_rank(config: dict[str, Any]) -> None:
    """Run the script in a process of its own, with the variables that any launcher sets; called by a Ray worker."""
    # What the folder tells about a failure is in the incident.
    with tempfile.TemporaryDirectory(prefix="windlass-ray-", ignore_cleanup_errors=True) as folder:
        incident = _failure_of_rank(from_text(config["plan"]), config["folder"], Path(folder))
    if incident is None:
        return
    if incident.ranks[0].lost_its_peers:
        time.sleep(_AFTER_THE_CAUSE)
    raise RankFailedError(_MARKER + json.dumps(incident.to_json()))


def _failure_of_rank(plan: LaunchPlan, cwd: str, folder: Path) -> Incident | None:
    """Run the script to its end; return its failure, None if it succeeded."""
    context = require("ray.train", "run under Ray").get_context()
    environ = {**os.environ, **_variables(plan, context, folder)}
    environ.pop(TOKEN_VARIABLE, None)  # a secret that only launchers need
    # Ray starts its workers in a folder of its own.
    where = cwd if os.path.isdir(cwd) else None
    process = subprocess.Popen(command(plan), env=environ, cwd=where)
    if process.wait() == 0:
        return None
    rank, machine = context.get_world_rank(), context.get_node_rank()
    error_file = environ["TORCHELASTIC_ERROR_FILE"]
    watched = Watched(rank, process.pid, process.poll, error_file, Lookout(folder, rank))
    return Watch(machine, [watched]).incident("failed")


def _variables(plan: LaunchPlan, context: Any, folder: Path) -> dict[str, str]:
    """Return the variables of this worker's process. Rank 0 chooses the address of the rendezvous."""
    rank = context.get_world_rank()
    collective = require("ray.train.collective", "run under Ray")
    address, port = collective.broadcast_from_rank_zero(_free_address() if rank == 0 else None)
    world = World(rank, context.get_world_size(), context.get_local_rank(), context.get_local_world_size())
    elsewhere = address if world.local_size < world.size else None  # others are on other machines
    return {
        **worker_environment(plan, world.local_size, elsewhere),
        **world.variables(),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        FOLDER_VARIABLE: str(folder),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }


def _free_address() -> tuple[str, int]:
    address = require("ray.util", "run under Ray").get_node_ip_address()
    return address, free_port(address)


def _report(error: Exception, world: int) -> int:
    """Report the incidents of the ranks, and return the exit code."""
    incident = Incident("failed")
    for failure in getattr(error, "worker_failures", {}).values():
        _, found, rest = str(failure).partition(_MARKER)
        if found:
            content, _ = json.JSONDecoder().raw_decode(rest)
            incident = incident.joined_with(Incident.from_json(content))
    if not incident.ranks:
        say(f"Ray could not run the job: {error}")
        return 1
    say(describe(incident, world, "those that Ray keeps on the machines of the cluster"))
    return exit_code(incident)
