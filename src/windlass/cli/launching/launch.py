"""Resolve flags, environment and launch file into one plan, and check it before a process starts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from windlass.cli.launching.launch_checks import Machine, launch_notes, launch_problems
from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.config.parallel import rows_launch as rows
from windlass.config.parallel import rows_training
from windlass.config.parallel.keys import Settings, merge
from windlass.config.parallel.parallel_plan import parallel_problems
from windlass.config.parallel.sources import OWN_VARIABLE, from_environment, from_flags, to_environment
from windlass.config.parallel.table import values_for
from windlass.core.errors import refuse
from windlass.core.logs import get_logger, warn_once
from windlass.core.world import World
from windlass.recipes.from_files import find_file, from_file

logger = get_logger(__name__)
# Kind of accelerator -> the variable that limits which of them a process sees.
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}


def resolve_launch(
    options: argparse.Namespace, environ: Mapping[str, str], machine: Machine | None = None
) -> LaunchPlan:
    """Resolve the command line (see `add_launch_flags`), the launch file and the environment into a plan. Raises
    ConfigError with every problem. Without a `machine` no accelerator is assumed.
    """
    here = machine or Machine()
    settings = launch_settings(options, environ)
    plan = _plan(options, settings, here)
    refuse([*launch_problems(plan, here, environ), *parallel_problems(settings, _world(plan))])
    # Only for a launch that takes place: of one that is refused the problems are enough.
    for note in [*settings.notes, *launch_notes(plan, environ)]:
        warn_once(logger, note)
    return replace(plan, environment=_environment(plan, here))


def launch_settings(options: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Merge flags, environment and launch file, in this order of precedence; each value keeps its origin."""
    said = vars(options)
    named = said.get("config_file")
    path, note = find_file(environ) if named is None else (named, "")
    file = Settings() if path is None else from_file(path)
    settings = merge(from_flags(said), from_environment(environ), file)
    if note:
        settings.notes.insert(0, note)
    return settings


def _plan(options: argparse.Namespace, settings: Settings, machine: Machine) -> LaunchPlan:
    said = values_for(settings, "launch", LaunchPlan)
    named = [] if said["devices"] == "all" else [word.strip() for word in said["devices"].split(",")]
    devices = [word for word in named if word]
    cpu = settings.value(rows_training.CPU)
    visible = 0 if cpu else len(devices) or machine.devices
    return LaunchPlan(
        **{**said, "devices": ",".join(devices), "processes": _processes(settings, visible)},
        script=options.script,
        arguments=tuple(options.arguments),
        module=options.module,
        no_python=options.no_python,
        bind_cores=True if settings.value(rows.AFFINITY) else None,
        cpu=cpu,
        settings=settings,
        grace=settings.value(rows.PREEMPTION_GRACE),
    )


def _processes(settings: Settings, devices: int) -> int:
    """The number that was set; else one per device of each machine, or one per machine without devices."""
    said = settings.value(rows.PROCESSES)
    return int(said) if said is not None else max(devices, 1) * int(settings.value(rows.MACHINES))


def _world(plan: LaunchPlan) -> World:
    # Wrong sizes are reported by `launch_problems`; the rules on layouts must not fail on them before.
    size = max(plan.processes, 1)
    return World(0, size, 0, max(size // plan.machines, 1))


def _environment(plan: LaunchPlan, machine: Machine) -> dict[str, str]:
    found = {name: str(value) for name, value in plan.environment.items()}
    if plan.devices and machine.device_kind in _VISIBLE:
        found[_VISIBLE[machine.device_kind]] = plan.devices
    return {**found, OWN_VARIABLE: to_environment(plan.settings)}
