"""Messages between the launchers of a job while its processes run: heartbeats, failures, early ends, and the end.

One thread of each launcher talks to the store over a connection of its own, and the main thread reads what it received:
a store that went down with its machine never answers. Machine 0 reads the message of every machine and writes one
summary, so that the traffic grows with the machines and not with their square.

The rendezvous has heartbeats of its own (`windlass.dist.rendezvous`), since it also serves machines that wait to join
and launchers that have no such thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from windlass.cli.launching.failure_report import Incident, LostMachine
from windlass.dist.signed_store import ForgedValueError

_BEAT_SECONDS = 1.0
# How long sending may take, and how long machine 0 keeps the store for those that have to read it.
_SEND_SECONDS = 3.0
_LEAVE_SECONDS = 10.0


class Peers:
    """The launchers of the other machines. This one has none: the normal case, a job on one machine.

    Attributes:
        early: a rank of any machine ended before it joined the process group.
        all_ended: the ranks of all machines have ended with exit code 0.
        is_final: another machine reported a failure after which the job does not restart.
        store_lost: the machine that held the store is gone: requests to it are not answered.
    """

    early = False
    all_ended = True
    is_final = False
    store_lost = False

    def note_early(self) -> None:
        """Report that a rank of this machine ended before it joined the process group."""

    def note_ended(self) -> None:
        """Report that all ranks of this machine have ended with exit code 0."""

    def report(self, incident: Incident, *, final: bool) -> None:
        """Send an incident of this machine; `final` if the job is not restarted."""

    def incidents(self) -> dict[int, Incident]:
        """Return what the others reported, by machine."""
        return {}

    def lost(self, limit: float | None = None) -> list[LostMachine]:
        """Return the machines that have been silent for longer than `limit` seconds, by default as configured."""
        return []

    def leave(self) -> None:
        """Sign off after all machines have ended; machine 0, which holds the store, waits for all the others."""

    def stop(self) -> None:
        """End the thread: the attempt is over."""


class OtherMachines(Peers):
    """The launchers of the other machines, over an empty store.

    Args:
        store: the store of this attempt, over a connection of its own.
        machine: rank of this machine; machine 0 holds the store.
        names: of all machines, in the order of their ranks.
        limit: seconds of silence after which a machine is lost.
        count_waiting: how many machines wait to join; called by the thread.
    """

    def __init__(
        self, store: Any, machine: int, names: list[str], limit: float, count_waiting: Callable[[], int]
    ) -> None:
        self._store, self._me, self._limit, self._count_waiting = store, machine, limit, count_waiting
        self.waiting = 0
        self._names = names
        self._message: dict[str, Any] = {"state": "runs"}
        self._incident: str | None = None
        self._beat = 0
        now = time.monotonic()
        # Of each machine: its last message, and when it arrived.
        self._seen: dict[int, tuple[dict[str, Any], float]] = {rank: ({}, now) for rank in range(len(names))}
        self._reported: dict[int, Incident] = {}
        self._answered = now
        self._broken = self._stopped = False
        self._sent = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="windlass-peers", daemon=True)
        self._thread.start()

    # --- the main thread

    @property
    def early(self) -> bool:  # type: ignore[override]
        return any(message.get("early") for message, _ in self._seen.values())

    @property
    def all_ended(self) -> bool:  # type: ignore[override]
        return all(message.get("state") in ("ended", "leaves") for message, _ in self._seen.values())

    @property
    def is_final(self) -> bool:  # type: ignore[override]
        return any(message.get("final") for rank, (message, _) in self._seen.items() if rank != self._me)

    @property
    def store_lost(self) -> bool:  # type: ignore[override]
        return self._broken or time.monotonic() - self._answered > self._limit

    def note_early(self) -> None:
        self._message["early"] = True

    def note_ended(self) -> None:
        self._message["state"] = "ended"

    def report(self, incident: Incident, *, final: bool) -> None:
        self._incident = json.dumps(incident.to_json())
        self._send(reported=True, final=final)

    def incidents(self) -> dict[int, Incident]:
        return dict(self._reported)

    def lost(self, limit: float | None = None) -> list[LostMachine]:
        limit, now = self._limit if limit is None else limit, time.monotonic()
        if self.all_ended:
            return []
        silence = now - self._answered
        # Without the store nothing is known of the others, and machine 0, which holds it, is what is missing.
        if self._broken or silence > limit:
            return [] if self._me == 0 or 0 in self._reported else [self._lost(0, silence)]
        # The store answers and machine 0 writes nothing: what its summary has of the others is old.
        if self._me != 0 and now - self._seen[0][1] > limit:
            return [self._lost(0, now - self._seen[0][1])]
        return [
            self._lost(rank, now - at)
            for rank, (message, at) in self._seen.items()
            if rank != self._me and now - at > limit and not message.get("reported")
        ]

    def leave(self) -> None:
        self._send(state="leaves")
        end = time.monotonic() + _LEAVE_SECONDS
        # The store ends with this process, and a machine that still reads it would report this one as lost.
        while self._me == 0 and not self._broken and time.monotonic() < end:
            if all(message.get("state") == "leaves" for message, _ in self._seen.values()):
                break
            time.sleep(0.1)

    def stop(self) -> None:
        with self._sent:
            self._stopped = True
            self._sent.notify_all()
        self._thread.join(_SEND_SECONDS)

    def _lost(self, rank: int, seconds: float) -> LostMachine:
        return LostMachine(rank, self._names[rank], seconds)

    def _send(self, **values: Any) -> None:
        """Add to the message, and wait until the thread has written it."""
        with self._sent:
            self._message.update(values)
            beat = self._beat
            self._sent.notify_all()
            # The beat after the one that may be on its way now.
            self._sent.wait_for(lambda: self._beat >= beat + 2 or self._broken, _SEND_SECONDS)

    # --- the thread

    def _run(self) -> None:
        try:
            if self._me == 0:
                keys = ["summary", *map(_key, self._seen)]
                self._store.multi_set(keys, ["{}"] * len(keys))
            self._store.wait(["summary"])
            while not self._stopped:
                with contextlib.suppress(ForgedValueError):  # not of this job: ignored
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
        store = self._store
        # Before the message that announces it: who reads the message finds the incident without a wait.
        if self._incident is not None:
            store.set(f"incident/{self._me}", self._incident)
        store.set(_key(self._me), json.dumps({**self._message, "beat": self._beat}))
        # One summary, so that a machine makes two requests a second however many machines there are.
        if self._me == 0:
            for rank, text in zip(self._seen, store.multi_get([*map(_key, self._seen)]), strict=True):
                message = json.loads(text)
                if message and message != self._seen[rank][0]:
                    self._seen[rank] = (message, time.monotonic())
            silent = {rank: time.monotonic() - at for rank, (_, at) in self._seen.items()}
            messages = {rank: message for rank, (message, _) in self._seen.items()}
            store.set("summary", json.dumps({"beat": self._beat, "messages": messages, "silent": silent}))
        else:
            self._read_summary(json.loads(store.get("summary")))
        for rank, (message, _) in self._seen.items():
            if message.get("reported") and rank not in self._reported and rank != self._me:
                self._reported[rank] = Incident.from_json(json.loads(store.get(f"incident/{rank}")))
        self.waiting = self._count_waiting()
        self._answered = time.monotonic()

    def _read_summary(self, summary: dict[str, Any]) -> None:
        now, messages, silent = time.monotonic(), summary.get("messages", {}), summary.get("silent", {})
        # The message of machine 0 counts its beats. If that count is the same, its other silences are old.
        is_new = messages.get("0") != self._seen[0][0]
        for rank, (before, at) in self._seen.items():
            arrived = now - silent.get(str(rank), 0.0) if is_new else at
            self._seen[rank] = (messages.get(str(rank), before), arrived)


def _key(rank: int) -> str:
    return f"message/{rank}"
