"""The rendezvous of several machines, with strangers among them; each is a handler with connections of its own."""

from __future__ import annotations

import base64
import os
import pickle
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

from windlass.dist.machines import meet
from windlass.dist.rendezvous import Machines, Meeting, MeetingError
from windlass.dist.signed_store import ForgedValueError, SignedStore

TOKEN = "what-only-this-job-knows"


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
    inside = PrefixStore("windlass/job", stranger)
    for value in (attack, attack.hex(), base64.b64encode(attack), b"\xff\xfe", b'{"machine": "x"}'):
        slot = inside.add("arrivals", 1)
        inside.set(f"arrival/{slot}", value)
    guest = machine(1)
    found = _together(host, guest)
    assert [info.rank for info in found] == [0, 1]
    assert not (tmp_path / "ran").exists()
    said = capfd.readouterr().err
    for slot in range(1, 6):
        assert (
            f"refused a value from a stranger: it does not have the token of this job (arrival/{slot})"
            in said
        )


@pytest.mark.parametrize("key", ["complete", "members/1", "closed"])
def test_a_forged_decision_is_an_error_that_names_it(
    machine: Any, port: int, tmp_path: Path, key: str
) -> None:
    host = machine(0)
    PrefixStore("windlass/job", _stranger(port)).set(key, pickle.dumps(Attack(tmp_path / "ran")).hex())
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
    host, guest = machine(0), machine(1)
    host.set_closed()
    with pytest.raises(RendezvousClosedError, match="the job 'job' has ended"):
        guest.next_rendezvous()


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
