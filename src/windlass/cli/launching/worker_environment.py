"""Environment variables of the processes of a job, besides those of torch's launcher."""

from __future__ import annotations

import os
import socket
import struct

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.worker import BIND_VARIABLE
from windlass.core.threads import usable_cores
from windlass.dist.listening import GLOO_VARIABLE, LOOPBACK, address_towards, is_loopback, loopback_interface

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>


def worker_environment(
    plan: LaunchPlan, local: int | None = None, main_address: str | None = None
) -> dict[str, str]:
    """Return variables for the processes of this machine; those that the user set are kept.

    Args:
        local: the number of these processes, if the engine chooses it.
        main_address: of the machine that others of the job meet at; None: that of the plan, if it has several.
    """
    local = local or plan.processes // plan.machines
    main_address = main_address or (plan.main_address if plan.machines > 1 else None)
    cores = usable_cores()
    bind = 1 < local <= cores if plan.bind_cores is None else plan.bind_cores
    found = {
        **_interface(main_address),
        # PyTorch's default is all cores in each process: they would compete for them, and spin while they wait.
        "OMP_NUM_THREADS": str(plan.threads or max(1, cores // local)),
        BIND_VARIABLE: "1" if bind else "0",
    }
    # A flag is said for this launch; a variable of the user, for all programs, replaces what is derived.
    kept = {} if plan.threads else {"OMP_NUM_THREADS"} & os.environ.keys()
    return {key: value for key, value in found.items() if key not in kept} | dict(plan.environment)


def _interface(main_address: str | None) -> dict[str, str]:
    """Return the interface for gloo, whose default follows the machine's name, which often does not resolve."""
    if GLOO_VARIABLE in os.environ:
        return {}
    address = LOOPBACK
    if main_address:
        try:
            address = address_towards(main_address, 0)
        except OSError:  # does not resolve or is not reachable: reported by the wait for the main machine
            return {}
    if is_loopback(address):
        name = loopback_interface()
    else:
        name = next((name for _, name in socket.if_nameindex() if _carries(name, address)), None)
    return {GLOO_VARIABLE: name} if name else {}


def _carries(interface: str, address: str) -> bool:
    """Return True if `interface` has this IPv4 address."""
    try:
        import fcntl
    except ImportError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has no address
            return False
    return socket.inet_ntoa(found[20:24]) == address
