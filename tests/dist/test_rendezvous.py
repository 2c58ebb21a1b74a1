"""The rendezvous of several machines, with unknown programs among them: each a handler with its own connections."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.launching.machines import free_port
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from windlass.dist.arrivals import MeetingError
from windlass.dist.machines import meet
from windlass.dist.rendezvous import Machines, Meeting
from windlass.dist.signed_store import ForgedValueError, SignedStore

TOKEN = "what-only-this-job-knows"
JOB = "windlass/job"


class Attack:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def machine(port: int) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(
        rank: int | None, token: str = TOKEN, machines: int = 2, hosts: bool = False, wait: int = 60
    ) -> Machines:
        meeting = Meeting("127.0.0.1", port, machines, rank, hosts or rank == 0, "job", wait, token)
        handler = meet(meeting)
        assert isinstance(handler, Machines)
        made.append(handler)
        return handler

    yield make
    for handler in reversed(made):
        handler.shutdown()


def _together(*handlers: Machines) -> list[Any]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return [asked.result(90) for asked in [pool.submit(handler.next_rendezvous) for handler in handlers]]


def _stranger(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def test_a_pickle_of_a_stranger_runs_nothing(machine: Any, port: int, tmp_path: Path, capfd: Any) -> None:
    host = machine(0)
    stranger = _stranger(port)
    attack = pickle.dumps(Attack(tmp_path / "ran"))
    # Where torch's rendezvous keeps its pickled state, and every place that this one reads.
    stranger.set("torch.rendezvous.job", base64.b64encode(attack))
    for place in (JOB, f"{JOB}/door"):
        inside = PrefixStore(place, stranger)
        for value in (attack, attack.hex(), base64.b64encode(attack), b"\xff\xfe", b'{"machine": "x"}'):
            slot = inside.add("arrivals", 1)
            inside.set(f"arrival/{slot}", value)
    guest = machine(1)
    found = _together(host, guest)
    assert [info.rank for info in found] == [0, 1]
    assert not (tmp_path / "ran").exists()
    said = capfd.readouterr().err
    for slot in range(1, 6):
        refused = f"refused an unsigned value: it does not have the token of this job (arrival/{slot})"
        assert said.count(refused) >= 2, "inside and at the door"


@pytest.mark.parametrize("key", ["complete", "members/1", "closed"])
def test_a_forged_decision_is_an_error_that_names_it(
    machine: Any, port: int, tmp_path: Path, key: str
) -> None:
    host = machine(0)
    PrefixStore(JOB, _stranger(port)).set(key, pickle.dumps(Attack(tmp_path / "ran")).hex())
    with pytest.raises(MeetingError, match=r"not signed with the token of this job|different tokens"):
        host.next_rendezvous()
    assert not (tmp_path / "ran").exists()


def test_a_machine_with_a_wrong_token_is_refused_by_name_on_both_sides(machine: Any, capfd: Any) -> None:
    host, right, wrong = machine(0), machine(1), machine(1, token="some-other-secret-token")
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(handler.next_rendezvous) for handler in (host, right)]
        assert [asked.result(60).rank for asked in first] == [0, 1]
        with pytest.raises(MeetingError, match="different tokens for the job 'job'"):
            wrong.next_rendezvous()
        assert host.num_nodes_waiting() == 0
    said = capfd.readouterr().err
    assert (
        f"refused machine {os.uname().nodename!r} ('127.0.0.1'): it does not have the token of this job"
        in said
    )


def test_members_know_what_the_others_are_called(machine: Any) -> None:
    members = machine(0), machine(1)
    _together(*members)
    assert [member.member_names() for member in members] == [[socket.gethostname()] * 2] * 2


def test_a_member_that_asks_again_takes_the_others_along(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.dist.rendezvous._OWN_FAILURE_SECONDS", 0.0)
    host, guest = machine(0), machine(1)
    first = _together(host, guest)
    assert host.num_nodes_waiting() == guest.num_nodes_waiting() == 0
    with ThreadPoolExecutor(2) as pool:
        again = pool.submit(guest.next_rendezvous)
        deadline = time.monotonic() + 60
        while host.num_nodes_waiting() == 0:
            assert time.monotonic() < deadline
        second = [pool.submit(host.next_rendezvous).result(60), again.result(60)]
    assert [info.rank for info in second] == [0, 1]
    stores = [info.bootstrap_store_info for info in (*first, *second)]
    assert stores[0] == stores[1]
    assert stores[2] == stores[3] != stores[0], "each attempt has a store of its own"


def test_a_machine_too_many_disturbs_nobody_and_takes_the_place_of_one_that_is_gone(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.dist.rendezvous._GONE_SECONDS", 3.0)
    host, lost = machine(None, hosts=True), machine(None)
    _together(host, lost)
    spare = machine(None)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(spare.next_rendezvous)
        while len(host._roster.wanting(2)) == 0:
            assert host.num_nodes_waiting() == 0
        lost._heart.stop()
        while host.num_nodes_waiting() == 0:
            pass
        info = pool.submit(host.next_rendezvous).result(60)
        assert (info.rank, waits.result(60).rank) == (0, 1)


def test_machines_that_were_told_different_numbers_are_named(machine: Any) -> None:
    host, guest = machine(0), machine(1, machines=3)
    with pytest.raises(MeetingError, match="was started for 3 machines, and this one for 2"):
        _together(host, guest)


def test_a_job_that_ended_takes_nobody_in(machine: Any) -> None:
    host, guest, late = machine(None, hosts=True), machine(None), machine(None)
    _together(host, guest)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(late.next_rendezvous)
        while len(host._roster.wanting(2)) == 0:
            host.num_nodes_waiting()
        host.set_closed()
        with pytest.raises(RendezvousClosedError, match="the job 'job' has ended"):
            waits.result(60)


def _recorded(port: int) -> dict[str, bytes]:
    """All values of a job that has met, beaten and ended, as anybody reads them who reaches the port."""
    handlers = [meet(Meeting("127.0.0.1", port, 2, rank, rank == 0, "job", 60, TOKEN)) for rank in range(2)]
    host, guest = handlers
    _together(*handlers)
    guest.set_closed()
    ids = [handler._id for handler in (host, guest)]
    keys = ["arrival/1", "arrival/2", "members/1", "complete", "round-1/workers", "closed", "door/open"]
    keys += [*(f"beat/{machine}" for machine in ids), "door/arrival/1", f"door/session/{guest._id}"]
    inside = PrefixStore(JOB, _stranger(port))
    found = {key: inside.get(key) for key in keys}
    for handler in (guest, host):
        handler.shutdown()
    return found


def test_what_was_signed_in_an_earlier_job_with_the_token_is_not_accepted(machine: Any, port: int) -> None:
    recorded = _recorded(free_port())
    host, guest = machine(0), machine(1)
    inside = PrefixStore(JOB, _stranger(port))
    # Below: a guest that reads the earlier job's workers before the host has written its own refuses them, too.
    workers = recorded.pop("round-1/workers")
    for key, value in recorded.items():
        inside.set(key, value)
    inside.add("arrivals", 2)
    inside.add("door/arrivals", 1)
    for key in ("complete", "closed", "members/1"):
        text = (
            f"'{key}' in the rendezvous store is not signed with the token of this job: .* in an earlier job"
        )
        with pytest.raises(MeetingError, match=text):
            host.next_rendezvous()
        inside.delete_key(key)
    # The arrivals and heartbeats of the earlier machines count for nothing.
    infos = _together(host, guest)
    assert [info.rank for info in infos] == [0, 1]
    assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
    # A machine that is led to the processes of the earlier job, and one that is given its session.
    inside.set("round-1/workers", workers)
    with pytest.raises(ForgedValueError, match="'workers'"):
        infos[1].store.get("workers")
    late = machine(1)
    (answer,) = (value for key, value in recorded.items() if key.startswith("door/session/"))
    inside.set(f"door/session/{late._id}", answer)
    with pytest.raises(MeetingError, match=f"'session/{late._id}' in the rendezvous store is not signed"):
        late.next_rendezvous()


def test_clocks_that_differ_or_jump_change_nothing(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86400 * (1 + threading.get_ident() % 3))
    assert [info.rank for info in _together(machine(0), machine(1))] == [0, 1]


def test_a_signature_holds_for_one_key_only(machine: Any, port: int) -> None:
    machine(0)
    inner = _stranger(port)
    ours = SignedStore(inner, b"k" * 32, "job")
    ours.set("a", "value")
    assert ours.get("a") == b"value"
    inner.set("job/b", inner.get("job/a"))
    for other in (ours, SignedStore(inner, b"K" * 32, "job")):
        with pytest.raises(ForgedValueError, match="was not read"):
            other.get("b")
