"""How the machines of a job find each other: always over one store on the main machine, whatever the user calls it.

"static" differs from "c10d" in one thing: machines have the ranks that the user gave them. A job on one machine opens
no store for its launcher.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler

from windlass.core.output import say
from windlass.dist.arrivals import MeetingError
from windlass.dist.listening import LOOPBACK, address_towards, open_store
from windlass.dist.rendezvous import Machines, Meeting, OneMachine
from windlass.dist.signed_store import SignedStore

_TRY_SECONDS = 2.0
# How long one request to the store may take; all that is asked for is there already.
_STORE_SECONDS = 60


class UnreachableError(MeetingError):
    """The main machine does not answer."""


def meet(meeting: Meeting) -> RendezvousHandler:
    """The handler that torch's agent asks for ranks. Raises MeetingError if no machine answers at the address within
    the time, or the port cannot be used.
    """
    if meeting.machines == 1:
        return OneMachine(meeting.run_id, meeting.port)
    if not meeting.hosts:
        return _join(meeting)
    try:
        return _host(meeting)
    except OSError as error:
        if meeting.rank is None:
            # Two launchers that start at once on one machine both find the port free, and one of them is faster.
            return _join(replace(meeting, hosts=False))
        raise UnreachableError(f"this machine cannot listen there: {error}") from None


def _host(meeting: Meeting) -> RendezvousHandler:
    store, where = open_store(meeting.address, meeting.port)
    how = "with a token" if meeting.token else "without a token"
    _tell(f"the rendezvous listens on {where or 'all addresses'}:{store.port}, {how}")
    # The first connection is the store itself, and keeps it open.
    clients = iter(partial(_client, where or LOOPBACK, store.port), None)
    stores = chain([store], clients)
    return _machines(meeting, lambda: next(stores), meeting.address)


def _join(meeting: Meeting) -> RendezvousHandler:
    wait_until_reachable(meeting.address, meeting.port, meeting.wait_seconds)
    own_address = address_towards(meeting.address, meeting.port)
    return _machines(meeting, lambda: _client(meeting.address, meeting.port), own_address)


def _client(address: str, port: int) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
    except RuntimeError as error:
        raise UnreachableError(f"what listens there is not a store of torch: {error}") from None


def _machines(meeting: Meeting, connect: Callable[[], Any], own_address: str) -> Machines:
    # What values are signed with.
    key = hashlib.sha256(f"windlass rendezvous\0{meeting.run_id}\0{meeting.token or ''}".encode()).digest()
    prefix = f"windlass/{meeting.run_id}"
    return Machines(meeting, lambda: SignedStore(connect(), key, prefix), own_address, _tell)


def _tell(text: str) -> None:
    say(f"windlass launch: {text}", error=True)


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
