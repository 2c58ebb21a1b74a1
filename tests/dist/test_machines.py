from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.cli.launching.machines import free_port
from tests.dist.launch import end_of
from torch.distributed.elastic.rendezvous import RendezvousInfo

from windlass.dist.arrivals import MeetingError
from windlass.dist.listening import address_towards, can_listen
from windlass.dist.machines import UnreachableError, meet, wait_until_reachable
from windlass.dist.rendezvous import Meeting

TOKEN = "a-secret-of-this-test"


@pytest.mark.parametrize(
    ("address", "check"),
    [("127.0.0.1", "nothing listens there"), ("no-such-host.invalid", "does not resolve here")],
)
def test_a_main_machine_that_does_not_answer_is_named_with_what_to_check(address: str, check: str) -> None:
    port = free_port()
    with pytest.raises(UnreachableError, match=check) as caught:
        wait_until_reachable(address, port, 0.1)
    assert f"{address}:{port}" in str(caught.value)


def test_it_is_waited_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        wait_until_reachable("127.0.0.1", listener.getsockname()[1], 5)


@pytest.mark.parametrize(
    ("rank", "address", "waits", "said"),
    [
        ("1", "127.0.0.1", "timeout=1", "start `windlass launch --machine_rank 0` on it"),
        ("1", "no-such-host.invalid", "timeout=1", "does not resolve here: check --main_process_ip"),
        (
            "0",
            "127.0.0.1",
            "join_timeout=1,id=job",
            "RendezvousTimeoutError: the machines did not meet: 1 of 2 came",
        ),
    ],
)
def test_the_launcher_ends_with_a_code_of_its_own(rank: str, address: str, waits: str, said: str) -> None:
    words = (
        "launch", "--cpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", rank, "--main_process_ip",
        address, "--main_process_port", str(free_port()), "--rdzv_conf", waits, __file__,
    )  # fmt: skip
    environ = {"WINDLASS_HOME": "/nowhere", "WINDLASS_RDZV_TOKEN": TOKEN}
    code, printed = end_of("windlass", *words, timeout=120, environ=environ)
    assert code == 69, printed
    assert said in printed


def test_an_address_of_this_machine_leads_to_the_other() -> None:
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"


def test_who_can_listen_holds_the_store() -> None:
    port = free_port()
    assert can_listen("127.0.0.1", port)
    assert not can_listen("192.0.2.1", port), "an address that no machine here has"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not can_listen("127.0.0.1", port)


def _meeting(port: int, rank: int | None, hosts: bool, token: str | None = None) -> Meeting:
    return Meeting("127.0.0.1", port, 2, rank, hosts, "test", 30, token)


def _both(ranks: tuple[int | None, int | None]) -> list[RendezvousInfo]:
    """Two machines meet, the host last to ask."""
    port = free_port()
    host = meet(_meeting(port, ranks[0], True))
    guest = meet(_meeting(port, ranks[1], False))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(handler.next_rendezvous) for handler in (guest, host)]
        return [asked[1].result(60), asked[0].result(60)]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_machines_keep_the_ranks_they_were_given(ranks: tuple[int, int]) -> None:
    found = _both(ranks)
    assert [info.rank for info in found] == list(ranks)
    first, second = (info.bootstrap_store_info for info in found)
    assert first is not None
    assert first == second


def test_without_given_ranks_each_gets_one() -> None:
    assert {info.rank for info in _both((None, None))} == {0, 1}


def test_of_two_that_both_take_themselves_for_the_host_one_gives_way() -> None:
    port = free_port()
    handlers = [meet(_meeting(port, None, True)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [asked.result(60) for asked in [pool.submit(handler.next_rendezvous) for handler in handlers]]
    assert {info.rank for info in found} == {0, 1}


def test_two_machines_of_one_rank_are_refused() -> None:
    with pytest.raises(MeetingError, match="they say --machine_rank 0, 0: each needs its own"):
        _both((0, 0))
