"""What is to be launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    processes: int = 1
    machines: int = 1
    machine_rank: int = 0
    main_address: str | None = None
    main_port: int | None = None
    rendezvous: str = "static"
    rendezvous_options: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    threads: int | None = None
    engine: str = "local"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stall_timeout: float | None = None
