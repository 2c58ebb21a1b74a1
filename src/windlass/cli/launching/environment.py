"""The variables that the processes of a job find, beside those of torch's launcher."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from windlass.cli.launching.worker import BIND_VARIABLE

if TYPE_CHECKING:
    from windlass.config.launch import LaunchPlan


def worker_environment(plan: LaunchPlan) -> dict[str, str]:
    """Variables for the processes of this machine. What the user set in the environment stays as it is."""
    local = plan.processes // plan.machines
    cores = usable_cores()
    bind = 1 < local <= cores if plan.bind_cores is None else plan.bind_cores
    found = {
        **_interface(plan),
        "OMP_NUM_THREADS": str(plan.threads or max(1, cores // local)),
        BIND_VARIABLE: "1" if bind else "0",
    }
    kept = {} if plan.threads else {"OMP_NUM_THREADS"} & os.environ.keys()
    return {key: value for key, value in found.items() if key not in kept} | dict(plan.environment)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _interface(plan: LaunchPlan) -> dict[str, str]:
    """The network interface that gloo takes: left alone it goes by the machine's name, which often leads nowhere."""
    if plan.machines > 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    names = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names), {})
