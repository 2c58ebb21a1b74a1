"""Machines that come to the rendezvous of a job, and the door at which they learn its session."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from windlass.core.errors import WindlassError
from windlass.core.whole_file import parse_json
from windlass.dist.signed_store import ForgedValueError, SignedStore

LOOK_SECONDS = 0.1
MOST_NAME = 200
_MOST_ARRIVALS = 100_000


class MeetingError(WindlassError):
    """The machines reached each other and cannot work together: a wrong token, or ranks that do not fit."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A machine that wants to be in a round."""

    slot: int  # position among all arrivals
    machine: str  # id of its launcher, new with each start
    # `host`, `address`: what it is called and where it is reached, for messages and for the processes' own store
    host: str
    address: str
    rank: int | None  # as the user gave it; None if the order of arrival decides
    machines: int  # the number of machines that its command line names
    round: int  # which round it wants; 0 at the door

    @staticmethod
    def read(slot: int, content: Any) -> Arrival:
        """Raises ValueError if `content` is not an arrival."""
        if not isinstance(content, dict):
            raise ValueError("not a table")
        machine, host, address = (content.get(name) for name in ("machine", "host", "address"))
        rank, machines, number = (content.get(name) for name in ("rank", "machines", "round"))
        if not all(isinstance(text, str) and len(text) <= MOST_NAME for text in (machine, host, address)):
            raise ValueError("no name")
        if not all(
            type(value) is int and value >= 0 for value in (machines, number, 0 if rank is None else rank)
        ):
            raise ValueError("no number")
        return Arrival(slot, machine, host, address, rank, machines, number)  # type: ignore[arg-type]

    def named(self) -> str:
        return f"machine {self.host!a} ({self.address!a})"


@dataclass(slots=True)
class Roster:
    """The arrivals found so far. A slot whose number was drawn and whose value is not there yet is looked at again."""

    store: SignedStore
    refuse: Callable[[str], None]
    arrivals: dict[str, list[Arrival]] = field(default_factory=dict)
    _next: int = 1
    _open: set[int] = field(default_factory=set)

    def append(self, about: dict[str, Any]) -> None:
        self.store.set_json(f"arrival/{self.store.add('arrivals', 1)}", about)

    def look(self) -> None:
        count = self.store.add("arrivals", 0)
        if count > _MOST_ARRIVALS:
            raise MeetingError(
                f"the rendezvous store has {count} arrivals, more than {_MOST_ARRIVALS}: another job may use its "
                "address"
            )
        self._open.update(range(self._next, count + 1))
        self._next = max(self._next, count + 1)
        for slot in sorted(self._open):
            if self.store.check([f"arrival/{slot}"]):
                self._open.discard(slot)
                self._read(slot)

    def _read(self, slot: int) -> None:
        key = f"arrival/{slot}"
        try:
            arrival = Arrival.read(slot, self.store.get_json(key))
        except ForgedValueError as forged:
            self.refuse(f"refused {_claimed(forged.content)}: it does not have the token of this job ({key})")
        except ValueError as error:
            self.refuse(f"ignored the rendezvous value {key}: it is not an arrival ({error})")
        else:
            self.arrivals.setdefault(arrival.machine, []).append(arrival)

    def wanting(self, number: int) -> list[Arrival]:
        """The last arrival of every machine that wants round `number`, oldest first."""
        last = [arrivals[-1] for arrivals in self.arrivals.values()]
        return sorted((a for a in last if a.round == number), key=lambda arrival: arrival.slot)


def _claimed(content: bytes) -> str:
    """The sender that a value without a valid signature names, for messages only."""
    try:
        return Arrival.read(0, parse_json(content)).named()
    except ValueError:
        return "an unsigned value"


class Door:
    """Where a machine learns the session of a job.

    A signature does not prove that a value is of this job: values of an earlier one with the same token have it too.
    Therefore the machine that holds the store draws a session, and everything but the values here is signed with a key
    made of the token and the session. A machine that comes asks with its id, which is new with each start, and the
    answer is signed together with that id. Neither can have been recorded earlier.

    Args:
        store: signed with the token.

    Attributes:
        session: "" until it is known.
    """

    def __init__(self, store: SignedStore, tell: Callable[[str], None]) -> None:
        self._store = store
        self._visitors = Roster(store, tell)
        self._answered: set[str] = set()
        self.session = ""

    def open(self) -> None:
        """Begin a session; only the holder of the store does this."""
        self.session = secrets.token_hex(16)
        self._store.set_json("open", True)

    def answer(self) -> None:
        """Tell the session to the machines that have asked since the last call."""
        self._visitors.look()
        for machine in self._visitors.arrivals.keys() - self._answered:
            self._store.set_json(f"session/{machine}", self.session)
            self._answered.add(machine)

    def ask(self, about: dict[str, Any], run_id: str, deadline: float) -> None:
        """Wait for the answer of the holder.

        Args:
            about: an `Arrival`.
            deadline: on the monotonic clock.

        Raises:
            MeetingError: the holder has another token.
            RendezvousTimeoutError: it did not answer.
        """
        self._visitors.append(about)
        answer = f"session/{about['machine']}"
        while not self._store.check([answer]):
            self._compare_tokens(run_id)
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError("the machines did not meet: the main machine did not answer")
            time.sleep(LOOK_SECONDS)
        self.session = str(self._store.get_json(answer))

    def _compare_tokens(self, run_id: str) -> None:
        try:
            if self._store.check(["open"]):
                self._store.get_json("open")
        except ForgedValueError as error:
            raise MeetingError(
                f"this machine, {socket.gethostname()!a}, and the main machine have different tokens for the job "
                f"{run_id!r}; give both the same one. {error}"
            ) from None
