"""How the machines of a job find each other: always over one store on the main machine, whatever the user calls it.

"static" differs from "c10d" in one thing: machines have the ranks that the user gave them. Torch's own static
rendezvous cannot restart a job, because its machines do not learn of each other's failures.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from windlass.cli.launching.environment import address_towards
from windlass.core.errors import WindlassError

DEFAULT_WAIT_SECONDS = 600
_TRY_SECONDS = 2.0
# All machines have met when ranks are compared: this is the time for a few exchanges with the store.
_AGREE_SECONDS = 60


class UnreachableError(WindlassError):
    """The main machine does not answer, or too few machines came."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how to meet.

    Attributes:
        address, port: of the store on the main machine; port 0 takes a free one, for a job on one machine.
        machines: how many there are in all.
        rank: of this machine; None lets the store decide.
        hosts: whether this machine holds the store.
        run_id: what the machines of one job have in common.
        wait_seconds: how long the others may take to come.
        options: further ones of torch's c10d rendezvous.
    """

    address: str
    port: int
    machines: int
    rank: int | None
    hosts: bool
    run_id: str
    wait_seconds: int
    options: Mapping[str, Any]


def meet(meeting: Meeting) -> RendezvousHandler:
    """The handler that torch's agent asks for ranks.

    Raises:
        UnreachableError: nobody answers at the address within the time.
    """
    if meeting.hosts and meeting.rank is None:
        try:
            return _join(meeting)
        except RendezvousConnectionError:
            # Two launchers that start at once on one machine both find the port free, and one of them is faster.
            meeting = replace(meeting, hosts=False)
    return _join(meeting)


def _join(meeting: Meeting) -> RendezvousHandler:
    if not meeting.hosts:
        wait_until_reachable(meeting.address, meeting.port, meeting.wait_seconds)
    own_address = meeting.address if meeting.hosts else address_towards(meeting.address, meeting.port)
    options = {"join_timeout": meeting.wait_seconds, "is_host": meeting.hosts, **meeting.options}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{meeting.address}:{meeting.port}",
        run_id=meeting.run_id,
        min_nodes=meeting.machines,
        max_nodes=meeting.machines,
        local_addr=own_address,
        **options,
    )
    backend, store = create_backend(parameters)
    return Ranked(create_handler(store, backend, parameters), meeting, own_address)


class Ranked(RendezvousHandler):
    """Torch's dynamic rendezvous, with the ranks of machines as the user numbered them.

    The main process of each attempt opens a store of its own: one that is shared between attempts holds what was left
    by the attempt before, and machines that counted restarts differently would not find each other in it.
    """

    def __init__(self, inner: RendezvousHandler, meeting: Meeting, own_address: str) -> None:
        self._inner = inner
        self._meeting = meeting
        self._own_address = own_address

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._inner.next_rendezvous()
        store = PrefixStore("windlass", found.store)
        rank = found.rank if self._meeting.rank is None else self._meeting.rank
        self._check(store, rank, found.rank, found.world_size)
        where = RendezvousStoreInfo.build(rank, store, self._own_address)
        return RendezvousInfo(store, rank, found.world_size, where)

    def _check(self, store: Store, rank: int, drawn: int, machines: int) -> None:
        """See that each rank is taken by one machine. `drawn` is the number that torch gave to this one."""
        store.set(f"rank-of/{drawn}", str(rank))
        keys = [f"rank-of/{number}" for number in range(machines)]
        store.wait(keys, timedelta(seconds=_AGREE_SECONDS))
        ranks = sorted(int(store.get(key)) for key in keys)
        if ranks != list(range(machines)):
            raise UnreachableError(
                f"{machines} machines met, and they say --machine_rank {', '.join(map(str, ranks))}: "
                f"each needs its own, from 0 to {machines - 1}"
            )

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def wait_until_reachable(address: str, port: int, seconds: float) -> None:
    """Return as soon as something listens at `address`:`port`.

    Raises:
        UnreachableError: nothing did within `seconds`; says what was tried and what to look at.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, port), timeout=_TRY_SECONDS):
                return
        except OSError as error:
            reason = error
        if time.monotonic() >= deadline:
            raise UnreachableError(_unreachable(address, port, seconds, reason))
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _unreachable(address: str, port: int, seconds: float, reason: OSError) -> str:
    if isinstance(reason, socket.gaierror):
        check = f"the name {address!r} does not resolve here: check --main_process_ip, or give the numeric address"
    elif isinstance(reason, ConnectionRefusedError):
        check = (
            "the machine answers and nothing listens there: start `windlass launch --machine_rank 0` on it, and check "
            "that --main_process_port is the same on every machine"
        )
    else:
        check = (
            "nothing comes back: check that the address belongs to the main machine, that both are on one network, and "
            f"that no firewall closes port {port}"
        )
    return (
        f"the main machine {address}:{port} could not be reached within {seconds:.0f} s ({reason}); {check}"
    )
