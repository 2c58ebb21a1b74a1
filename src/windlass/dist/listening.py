"""Which addresses this machine listens on: the one that the job meets at, and never all of them unasked."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.dist.variables import environment_of

LOOPBACK = "127.0.0.1"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACES = ("lo", "lo0")
_BACKLOG = 2048


def is_loopback(address: str) -> bool:
    """Return True if `address`, a name or a number, can only be reached from this machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_store(address: str, port: int = 0) -> tuple[Any, str]:
    """Open a store that listens on `address` only; torch's own listens on all addresses of the machine. Raises OSError
    if the port is in use.

    Returns:
        The store and the address it listens on. That is "" (all addresses) if `address` does not belong to this
        machine, such as that of a forwarding gateway, or is a name that leads to loopback here and elsewhere does not.
    """
    # Here, because a torch that was built without distribution has none.
    from torch._C._distributed_c10d import TCPStore

    listener, where = _listen(address, port)
    chosen = listener.getsockname()[1]
    client = where or LOOPBACK
    # The store owns the file descriptor from here on.
    store = TCPStore(
        client,
        chosen,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, where


def _listen(address: str, port: int) -> tuple[socket.socket, str]:
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    where = str(target[0])
    if is_loopback(where) and not is_loopback(address):
        where = ""  # as in an /etc/hosts that gives the machine's own name a loopback address
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((where, port))
        except OSError:
            if not where or can_listen(where, 0, family):
                raise
            where = ""
            listener.bind((where, port))
        listener.listen(_BACKLOG)
        undo.pop_all()
    return listener, where


def can_listen(address: str, port: int, family: int = socket.AF_INET) -> bool:
    """Return True if `address` belongs to this machine and no process listens at `port` there, if it is not 0."""
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port(address: str = LOOPBACK) -> int:
    """Return a port of this machine at which no process listens now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def address_towards(address: str, port: int) -> str:
    """The address of this machine on the way to `address`. Nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def loopback_interface() -> str | None:
    """Name of the loopback interface, None if it cannot be found."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in _LOOPBACK_INTERFACES if name in names), None)


def keep_gloo_on_loopback() -> None:
    """For the rest of this process: a job on one machine. What the user chose stays."""
    name = loopback_interface()
    if name is not None:
        os.environ.setdefault(GLOO_VARIABLE, name)


def check_gloo_devices() -> None:
    """Raise ConfigError if the user has chosen network devices for gloo that this machine does not have."""
    chosen, there = os.environ.get(GLOO_VARIABLE, ""), [name for _, name in socket.if_nameindex()]
    missing = [name for name in chosen.split(",") if name and name not in there]
    if missing:
        fix = f"this machine has no {', '.join(missing)}; it has {', '.join(there)}: name one of them, or unset it"
        raise ConfigError(Problem(GLOO_VARIABLE, chosen, fix))


@contextlib.contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Within it, process groups of gloo listen on loopback; by itself gloo takes the address of the host's name."""
    with environment_of(**{GLOO_VARIABLE: os.environ.get(GLOO_VARIABLE, loopback_interface())}):
        yield
