"""The engines that run a job, by name, and the plan as text for engines that run it on other machines."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Protocol, cast

from windlass.cli.launching.launch_plan import LaunchPlan


class Engine(Protocol):
    """A module of this package: `run` starts the job and returns its exit code; `show` returns the job as text."""

    run: Callable[[LaunchPlan], int]
    show: Callable[[LaunchPlan], str]


def engine(name: str) -> Engine:
    """Import and return the engine "local", "slurm" or "ray"."""
    return cast(Engine, importlib.import_module(f"windlass.cli.launching.{name}"))


def to_text(plan: LaunchPlan) -> str:
    """Return JSON that `from_text` reads on another machine.

    Settings are left out: `WINDLASS_PARALLEL`, in the plan's environment, carries them to the processes.
    """
    kept = [item.name for item in dataclasses.fields(plan) if item.name != "settings"]
    return json.dumps({name: getattr(plan, name) for name in kept}, default=dict)


def from_text(text: str) -> LaunchPlan:
    """Return the plan of `to_text`."""
    content = json.loads(text)
    # JSON has no tuples, and plans are compared.
    return LaunchPlan(**{**content, "arguments": tuple(content["arguments"])})
