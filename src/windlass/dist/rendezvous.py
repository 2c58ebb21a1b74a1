"""How the launchers of a job meet and agree on ranks.

Torch's own rendezvous keeps its state in the store as a pickle, which runs any code that another program put there, and
compares the clocks of the machines. Here the machines exchange JSON, each value signed with the job's token.

The machine that holds the store writes the list of members of a round; the others only ask to be in it:

- A machine that comes learns the session at the door (`Door`); all that follows is signed for that session.
- A machine that wants to join appends an arrival: its id, its name, its rank and the round it wants.
- The holder of the store reads the arrivals. When there are as many machines alive as the job needs it writes the
  members of the round, which is the moment all of them return from `next_rendezvous`.
- A member that wants the next round (its processes failed) is seen by the others, who join it too. A machine that is
  not a member is let in by the holder when a member is gone: one whose heartbeats stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from windlass.core.attempt import ONE_ATTEMPT
from windlass.dist.arrivals import LOOK_SECONDS, MOST_NAME, Arrival, Door, MeetingError, Roster
from windlass.dist.listening import LOOPBACK, open_store
from windlass.dist.signed_store import ForgedValueError, SignedStore

DEFAULT_WAIT_SECONDS = 600
_BEAT_SECONDS = 1.0
# A machine without a heartbeat for so long counts as gone.
_GONE_SECONDS = 15.0
# A member asks for the next round because its processes failed. Those of the others fail soon, too, for want of their
# peers, and say why; only where they do not within this time are they stopped by their own launcher.
_OWN_FAILURE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how to meet."""

    # `address`, `port`: of the store on the main machine; port 0 takes a free one, for a job on one machine
    address: str
    port: int
    machines: int  # how many there are in all
    rank: int | None  # of this machine; None lets the order of arrival decide
    hosts: bool  # whether this machine holds the store
    run_id: str  # what the machines of one job have in common
    wait_seconds: int  # how long the others may take to come
    # The secret of the job; None lets every machine that reaches the address join
    token: str | None = field(default=None, repr=False)


def open_workers_store(address: str, port: int = 0) -> tuple[Any, RendezvousStoreInfo]:
    """A store for the processes of one attempt, on this machine."""
    store, _ = open_store(address, port)
    store.set(ONE_ATTEMPT, "1")
    return store, RendezvousStoreInfo(address, store.port)


class _Handler(RendezvousHandler):
    """What is alike for one machine and for several: who the processes' own store belongs to.

    The launcher holds that store, a new one for each attempt: one that is shared between attempts holds the addresses
    of processes that are gone, and a process that opens its own listens on all addresses.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._workers: Any = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "windlass"

    def get_run_id(self) -> str:
        return self._run_id


class OneMachine(_Handler):
    """A job on one machine, without a rendezvous. Its processes' store listens on loopback only."""

    def __init__(self, run_id: str, port: int = 0) -> None:
        super().__init__(run_id)
        self._port = port
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        self._workers = None  # before the next one takes the same port
        try:
            self._workers, where = open_workers_store(LOOPBACK, self._port)
        except OSError as error:
            raise MeetingError(f"port {self._port} of {LOOPBACK} cannot be used: {error}") from None
        return RendezvousInfo(HashStore(), 0, 1, where)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed, self._workers = True, None
        return True


class Machines(_Handler):
    """A job on several machines.

    Args:
        connect: opens a connection to the shared store, signed with the token: one for this thread, and one for each
            that has to go on when another waits for an answer.
        address: where the other machines reach this one.
        tell: shows a line to the user.
    """

    def __init__(
        self, meeting: Meeting, connect: Callable[[], SignedStore], address: str, tell: Callable[[str], None]
    ) -> None:
        super().__init__(meeting.run_id)
        self._outside, self._tell = connect, tell
        self._meeting, self._address = meeting, address
        self._id = uuid.uuid4().hex
        self._members: list[str] = []
        self._round = 0
        self._clash_since: float | None = None
        self._asked_since: float | None = None
        self._heart: Heart | None = None  # beats from the moment this machine knows the session
        self._waiting = self.ask_waiting

    def attempt_store(self) -> SignedStore:
        """The store of this attempt, over a connection of its own, for a lost machine keeps who asks it waiting."""
        return self._connect().below(f"round-{self._round}")

    def member_names(self) -> list[str]:
        """What the machines of this round are called, in the order of their ranks."""
        with _connection():
            self._look()  # the last may have come since this one looked
            return [self._roster.arrivals[member][-1].host for member in self._members]

    def answer_waiting(self, known: Callable[[], int]) -> None:
        """Use `known` as the number of waiting machines, instead of querying the store each time."""
        self._waiting = known

    def next_rendezvous(self) -> RendezvousInfo:
        self._workers = None
        with _connection():
            deadline = time.monotonic() + self._meeting.wait_seconds
            if self._heart is None:
                self._heart = self._enter(deadline)
            members = self._join(deadline)
            rank = members.index(self._id)
            attempt = self._store.below(f"round-{self._round}")
            return RendezvousInfo(attempt, rank, len(members), self._workers_store(attempt, rank))

    def _enter(self, deadline: float) -> Heart:
        """Learn the session, and sign for it from here on."""
        self._door = Door(self._outside().below("door"), self._tell)
        if self._meeting.hosts:
            self._door.open()
        else:
            self._door.ask(self._about(0), self._run_id, deadline)
        self._store = self._connect()
        self._roster, self._pulse = Roster(self._store, self._tell), Pulse(self._store)
        return Heart(self._connect(), self._id)

    def _connect(self) -> SignedStore:
        return self._outside().of_session(self._door.session)

    def _look(self) -> None:
        if self._meeting.hosts:
            self._door.answer()
        self._roster.look()

    def _join(self, deadline: float) -> list[str]:
        number = self._arrive(self._round + 1)
        while True:
            if self.is_closed():
                raise RendezvousClosedError(f"the job {self._run_id!r} has ended")
            self._look()
            if self._meeting.hosts:
                self._admit(number)
            if self._store.check([f"members/{number}"]):
                members = self._read_members(number)
                if self._id in members:
                    self._round, self._members, self._asked_since = number, members, None
                    return members
                number = self._arrive(number + 1)  # a machine too many waits for the next round
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._missing(number))
            time.sleep(LOOK_SECONDS)

    def _arrive(self, number: int) -> int:
        """Ask for round `number`, or a later one if that is complete. Return which."""
        number = max(number, self._complete() + 1)
        self._roster.append(self._about(number))
        return number

    def _about(self, number: int) -> dict[str, Any]:
        return {
            "machine": self._id,
            "host": socket.gethostname()[:MOST_NAME],
            "address": self._address[:MOST_NAME],
            "rank": self._meeting.rank,
            "machines": self._meeting.machines,
            "round": number,
        }

    def _complete(self) -> int:
        """The last round that is complete."""
        return int(self._store.get_json("complete")) if self._store.check(["complete"]) else 0

    def _admit(self, number: int) -> None:
        """Write the members of the round, if the machines for it are there. Only the holder of the store does this."""
        wanting = self._roster.wanting(number)
        alive = [a for a in wanting if a.machine == self._id or self._pulse.alive(a.machine)]
        if odd := next((a for a in alive if a.machines != self._meeting.machines), None):
            text = f"{odd.named()} was started for {odd.machines} machines, and this one for {self._meeting.machines}"
            self._store.set_json(f"members/{number}", {"problem": text})
            return
        # The holder, then who was here before, then newcomers in the order of their arrival.
        alive.sort(key=lambda a: (a.machine != self._id, a.machine not in self._members, a.slot))
        found = self._by_order(alive) if self._meeting.rank is None else self._by_rank(alive)
        if found:
            self._store.set_json(f"members/{number}", found)
            self._store.set_json("complete", number)

    def _by_order(self, alive: list[Arrival]) -> dict[str, Any]:
        chosen = alive[: self._meeting.machines]
        return {"members": [a.machine for a in chosen]} if len(chosen) == self._meeting.machines else {}

    def _by_rank(self, alive: list[Arrival]) -> dict[str, Any]:
        """The newest machine of each rank; a problem if machines that are all alive share one."""
        newest = {a.rank: a.machine for a in sorted(alive, key=lambda a: a.slot)}
        newest[self._meeting.rank] = self._id
        if sorted(newest, key=str) == sorted(range(self._meeting.machines), key=str):
            return {"members": [newest[rank] for rank in range(self._meeting.machines)]}
        if len(alive) < self._meeting.machines:
            self._clash_since = None
            return {}
        now = time.monotonic()
        self._clash_since = self._clash_since or now
        # One of two with the same rank may be gone, and started again: wait until both have shown that they live.
        if not all(a.machine == self._id or self._pulse.seen(a.machine) > self._clash_since for a in alive):
            return {}
        ranks = ", ".join(str(a.rank) for a in sorted(alive, key=lambda a: str(a.rank)))
        text = (
            f"{len(alive)} machines met, and they say --machine_rank {ranks}: "
            f"each needs its own, from 0 to {self._meeting.machines - 1}"
        )
        return {"problem": text}

    def _read_members(self, number: int) -> list[str]:
        found = self._store.get_json(f"members/{number}")
        if "problem" in found:
            raise MeetingError(str(found["problem"]))
        return [str(member) for member in found["members"]]

    def _missing(self, number: int) -> str:
        there = [a.named() for a in self._roster.wanting(number)]
        return (
            f"the machines did not meet: {len(there)} of {self._meeting.machines} came ({', '.join(there)})"
        )

    def _workers_store(self, attempt: SignedStore, rank: int) -> RendezvousStoreInfo:
        if rank == 0:
            self._workers, where = open_workers_store(self._address)
            attempt.set_json("workers", [where.master_addr, where.master_port])
        address, port = attempt.get_json("workers")
        return RendezvousStoreInfo(str(address), int(port))

    def num_nodes_waiting(self) -> int:
        return self._waiting()

    def ask_waiting(self) -> int:
        """How many machines wait to join, as the store has it; not to be asked by two threads at once."""
        with _connection():
            self._look()
            wanting = [a for a in self._roster.wanting(self._round + 1) if a.machine != self._id]
            again = [a for a in wanting if a.machine in self._members]
            if again:
                now = time.monotonic()
                self._asked_since = self._asked_since or now
                return len(again) if now - self._asked_since >= _OWN_FAILURE_SECONDS else 0
            if not wanting or not self._meeting.hosts:
                return 0
            gone = [m for m in self._members if m != self._id and not self._pulse.alive(m)]
            return min(len(wanting), len(gone))

    def is_closed(self) -> bool:
        with _connection():
            if self._heart is None or not self._store.check(["closed"]):
                return False
            self._store.get_json("closed")  # raises if it is not signed by this job
            return True

    def set_closed(self) -> None:
        if self._heart is None:
            return  # this machine is not in the job
        with _connection():
            self._store.set_json("closed", self._id)

    def shutdown(self) -> bool:
        if self._heart is not None:
            self._heart.stop()
        self._workers = None
        try:
            self.set_closed()
        except RendezvousConnectionError:
            return False
        return True


@contextlib.contextmanager
def _connection() -> Iterator[None]:
    try:
        yield
    except ForgedValueError as error:
        raise MeetingError(str(error)) from None
    except RuntimeError as error:  # what torch's stores raise
        raise RendezvousConnectionError("the connection to the rendezvous store has failed") from error


class Heart:
    """A thread that counts up in the store for as long as this machine is there."""

    def __init__(self, store: SignedStore, machine: str) -> None:
        self._store, self._key = store, f"beat/{machine}"
        self._stop = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._beat, name="windlass-rendezvous-heart", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: the next call that needs it raises
            while True:
                count += 1
                self._store.set_json(self._key, count)
                if self._stop.wait(_BEAT_SECONDS):
                    return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_SECONDS)


class Pulse:
    """Whether machines live, by their heartbeats and this machine's own monotonic clock."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._last: dict[str, tuple[Any, float]] = {}
        self._looked: dict[str, float] = {}

    def alive(self, machine: str) -> bool:
        return time.monotonic() - self.seen(machine) < _GONE_SECONDS

    def seen(self, machine: str) -> float:
        """When its heartbeat last changed."""
        now = time.monotonic()
        if now - self._looked.get(machine, 0.0) >= _BEAT_SECONDS / 2:
            self._looked[machine] = now
            with contextlib.suppress(ForgedValueError):  # as good as none
                key = f"beat/{machine}"
                value = self._store.get_json(key) if self._store.check([key]) else None
                if machine not in self._last or self._last[machine][0] != value:
                    self._last[machine] = (value, now)
        return self._last.get(machine, (None, now))[1]
