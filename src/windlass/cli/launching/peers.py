"""What the launchers of a job's machines let each other know while their processes run: that they live, what failed,
which ranks ended early, and when all have ended.

One thread of each launcher talks to the store, with a connection of its own, and the main thread looks at what it has
learnt: a store that went down with its machine answers nobody, and who asks it may wait for ever. Machine 0 reads what
all machines write and writes one summary, so that the traffic grows with the machines and not with their square.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.cli.launching.failure_report import Incident, LostMachine
from windlass.dist.signed_store import ForgedValueError

# How often a launcher gives a sign and looks for those of the others.
_BEAT_SECONDS = 1.0
# How long what is to be sent may take, and how long machine 0 keeps the store for those that have to read it.
_SEND_SECONDS = 3.0
_LEAVE_SECONDS = 10.0


class Peers:
    """The launchers of the other machines. This one has none: the normal case, a job on one machine."""

    early = False
    all_ended = True
    gave_up = False
    store_lost = False

    def note_early(self) -> None:
        """A rank of this machine ended before it joined the process group."""

    def note_ended(self) -> None:
        """All ranks of this machine have ended well."""

    def tell(self, incident: Incident, *, final: bool) -> None:
        """Let the others know what happened here; `final` if the job is not started again."""

    def incidents(self) -> dict[int, Incident]:
        """What the others have told, by machine."""
        return {}

    def lost(self, limit: float | None = None) -> list[LostMachine]:
        """Machines that gave no sign for longer than `limit` seconds, by default as configured."""
        return []

    def leave(self) -> None:
        """Say good-bye, after all machines have ended; machine 0, which holds the store, waits for all the others."""

    def stop(self) -> None:
        """The attempt is over."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which machine this is, and how long the others may be silent.

    Attributes:
        machine, machines: rank and number of machines; machine 0 holds the store.
        limit: seconds without a sign after which a machine is lost.
    """

    machine: int
    machines: int
    limit: float


class OtherMachines(Peers):
    """The launchers of the other machines, over a store in which nothing of earlier attempts lies.

    Args:
        store: the store of this attempt, over a connection of its own.
        count_waiting: how many machines wait to join; asked by the thread.
    """

    def __init__(self, store: Any, place: Place, count_waiting: Callable[[], int]) -> None:
        self._store, self._place, self._count_waiting = store, place, count_waiting
        self.waiting = 0
        self._signs: dict[str, Any] = {"name": socket.gethostname(), "state": "runs"}
        self._incident: str | None = None
        self._beat = 0
        now = time.monotonic()
        # Of each machine: its last sign, and when it came.
        self._seen: dict[int, tuple[dict[str, Any], float]] = {
            machine: ({}, now) for machine in range(place.machines)
        }
        self._told: dict[int, Incident] = {}
        self._answered = now
        self._broken = self._stopped = False
        self._sent = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="windlass-peers", daemon=True)
        self._thread.start()

    # --- the main thread

    @property
    def early(self) -> bool:  # type: ignore[override]
        return any(sign.get("early") for sign, _ in self._seen.values())

    @property
    def all_ended(self) -> bool:  # type: ignore[override]
        return all(sign.get("state") in ("ended", "leaves") for sign, _ in self._seen.values())

    @property
    def gave_up(self) -> bool:  # type: ignore[override]
        return any(sign.get("final") for machine, (sign, _) in self._seen.items() if machine != self._me)

    @property
    def store_lost(self) -> bool:  # type: ignore[override]
        return self._broken or time.monotonic() - self._answered > self._place.limit

    def note_early(self) -> None:
        self._signs["early"] = True

    def note_ended(self) -> None:
        self._signs["state"] = "ended"

    def tell(self, incident: Incident, *, final: bool) -> None:
        self._incident = json.dumps(incident.to_json())
        self._send(told=True, final=final)

    def incidents(self) -> dict[int, Incident]:
        return dict(self._told)

    def lost(self, limit: float | None = None) -> list[LostMachine]:
        limit, now = self._place.limit if limit is None else limit, time.monotonic()
        if self.all_ended:
            return []
        silence = now - self._answered
        if self._broken or silence > limit:
            return [] if self._me == 0 or 0 in self._told else [self._lost(0, silence)]
        if self._me != 0 and now - self._seen[0][1] > limit:
            return [self._lost(0, now - self._seen[0][1])]
        return [
            self._lost(machine, now - at)
            for machine, (sign, at) in self._seen.items()
            if machine != self._me and now - at > limit and not sign.get("told")
        ]

    def leave(self) -> None:
        self._send(state="leaves")
        end = time.monotonic() + _LEAVE_SECONDS
        while self._me == 0 and not self._broken and time.monotonic() < end:
            if all(sign.get("state") == "leaves" for sign, _ in self._seen.values()):
                break
            time.sleep(0.1)

    def stop(self) -> None:
        with self._sent:
            self._stopped = True
            self._sent.notify_all()
        self._thread.join(_SEND_SECONDS)

    @property
    def _me(self) -> int:
        return self._place.machine

    def _lost(self, machine: int, seconds: float) -> LostMachine:
        return LostMachine(machine, self._seen[machine][0].get("name", ""), seconds)

    def _send(self, **signs: Any) -> None:
        """Add to the sign, and wait until the thread has written it."""
        with self._sent:
            self._signs.update(signs)
            beat = self._beat
            self._sent.notify_all()
            # The beat after the one that may be on its way now.
            self._sent.wait_for(lambda: self._beat >= beat + 2 or self._broken, _SEND_SECONDS)

    # --- the thread

    def _run(self) -> None:
        try:
            if self._me == 0:
                names = [_sign_of(machine) for machine in range(self._place.machines)]
                self._store.multi_set(["summary", *names], ["{}"] * (len(names) + 1))
            self._store.wait(["summary"])
            while not self._stopped:
                with contextlib.suppress(ForgedValueError):  # of a stranger, who is not heard
                    self._exchange()
                with self._sent:
                    self._beat += 1
                    self._sent.notify_all()
                    self._sent.wait(_BEAT_SECONDS)
        except Exception:  # the connection broke: the launcher that held the store has ended
            self._broken = True
            with self._sent:
                self._sent.notify_all()

    def _exchange(self) -> None:
        store, machines = self._store, range(self._place.machines)
        if self._incident is not None:
            store.set(f"incident/{self._me}", self._incident)
        own = {**self._signs, "beat": self._beat}
        store.set(_sign_of(self._me), json.dumps(own))
        if self._me == 0:
            for machine, text in zip(machines, store.multi_get([_sign_of(m) for m in machines]), strict=True):
                self._note(machine, json.loads(text))
            silent = {machine: time.monotonic() - at for machine, (_, at) in self._seen.items()}
            signs = {machine: sign for machine, (sign, _) in self._seen.items()}
            store.set("summary", json.dumps({"beat": self._beat, "signs": signs, "silent": silent}))
        else:
            self._read_summary(json.loads(store.get("summary")))
        for machine in machines:
            if self._seen[machine][0].get("told") and machine not in self._told and machine != self._me:
                self._told[machine] = Incident.from_json(json.loads(store.get(f"incident/{machine}")))
        self.waiting = self._count_waiting()
        self._answered = time.monotonic()

    def _read_summary(self, summary: dict[str, Any]) -> None:
        now, signs, silent = time.monotonic(), summary.get("signs", {}), summary.get("silent", {})
        fresh = signs.get("0") != self._seen[0][0]
        for machine in range(self._place.machines):
            before, at = self._seen[machine]
            if fresh:
                at = now - silent.get(str(machine), 0.0)
            self._seen[machine] = (signs.get(str(machine), before), at)

    def _note(self, machine: int, sign: dict[str, Any]) -> None:
        if sign and sign != self._seen[machine][0]:
            self._seen[machine] = (sign, time.monotonic())


def _sign_of(machine: int) -> str:
    return f"sign/{machine}"
