"""The plan of a launch, which every engine reads, and its text for engines that run it on other machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from windlass.config.parallel.keys import Settings


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A script in many processes.

    Fields that have the name of a launch setting (`config/parallel/rows_launch.py`) hold its value.
    """

    script: str  # path of a script, name of a module (`module`), or a program (`no_python`)
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    processes: int = 1
    machines: int = 1
    machine_rank: int = 0
    main_address: str | None = None
    main_port: int | None = None
    rendezvous: Literal["static", "c10d"] = "static"
    rendezvous_options: Mapping[str, Any] = field(default_factory=dict)
    token_file: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    threads: int | None = None
    bind_cores: bool | None = None
    role: str = "default"
    devices: str = ""  # numbers of the accelerators to use; empty uses all
    engine: Literal["local", "slurm", "ray"] = "local"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    # Environment variables of all processes, `WINDLASS_PARALLEL` among them
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)  # all settings with their origins
    # Seconds without a mark after which a process counts as stalled; None for never
    stall_timeout: float | None = None
    machine_timeout: float = (
        30.0  # seconds of silence after which the launcher of another machine counts as lost
    )
    grace: int = 120  # seconds that processes have to save and exit after a request to exit
    requeue: bool = False
    max_requeues: int | None = None


def to_text(plan: LaunchPlan) -> str:
    """Return JSON that `from_text` reads on another machine.

    Settings are left out: `WINDLASS_PARALLEL`, in the plan's environment, carries them to the processes.
    """
    kept = [item.name for item in fields(plan) if item.name != "settings"]
    return json.dumps({name: getattr(plan, name) for name in kept}, default=dict)


def from_text(text: str) -> LaunchPlan:
    """Return the plan of `to_text`."""
    content = json.loads(text)
    # JSON has no tuples, and plans are compared.
    return LaunchPlan(**{**content, "arguments": tuple(content["arguments"])})
