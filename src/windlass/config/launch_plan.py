"""What is to be launched: the plan that every engine works from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.config.parallel.settings import Settings


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A script in many processes.

    Attributes:
        script: path of a script, name of a module (`module`), or a program (`no_python`).
        processes: on all machines together.
        main_address, main_port: where machines meet; None leaves the choice to the engine, on one machine.
        token_file: holds the secret of a job on several machines; None reads `WINDLASS_RDZV_TOKEN`.
        tee: which streams go to the console and `log_dir`: "0" none, "1" output, "2" errors, "3" both, or by rank.
        threads: of each process; None shares the machine's cores out.
        devices: numbers of the accelerators to use; empty uses all.
        environment: variables that every process finds, `WINDLASS_PARALLEL` among them.
        settings: everything that was said, with its origin.
        stall_timeout: seconds without progress after which the job is ended and reported.
        machine_timeout: seconds without a sign of another machine's launcher after which that machine is lost.
        grace: seconds that processes have to save and end when they are told to leave.
        requeue: a job that left, because a scheduler asked it to, is started again.
        max_requeues: how often, at most; None without a limit.
    """

    script: str
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
    devices: str = ""
    engine: Literal["local", "slurm", "ray"] = "local"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    stall_timeout: float | None = None
    machine_timeout: float = 30.0
    grace: int = 120
    requeue: bool = False
    max_requeues: int | None = None
