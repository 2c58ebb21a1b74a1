from __future__ import annotations

import json
from typing import Any

import pytest

from windlass.cli.launching.failure_report import Incident, LostMachine, RankFacts, describe, exit_code
from windlass.dist.beacon import Mark

PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:918"
TIMED_OUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"


def facts(
    rank: int, ending: Any, step: int | None = None, call: str = "", marks: int = 0, **rest: Any
) -> RankFacts:
    return RankFacts(rank, 0, ending, mark=Mark(marks, step, call), **rest)


def failed(rank: int, message: str = "", code: int = 1, time: float = 1.0, **rest: Any) -> RankFacts:
    return facts(rank, "failed", exit_code=code, message=message, time=time, **rest)


def test_a_rank_that_lost_its_peers_is_no_cause_though_it_failed_first() -> None:
    incident = Incident("failed", [failed(0, PEER, time=1.0), failed(1, "KeyError: 'x'", time=2.0)])
    assert incident.culprit.rank == 1
    assert incident.knows_its_cause


def test_a_rank_that_reached_no_server_did_not_lose_its_peers() -> None:
    refused = "CheckpointError: cannot read https://hub/a/b: ConnectError: [Errno 111] Connection refused"
    incident = Incident("failed", [failed(0, refused), failed(1, PEER, time=0.5)])
    assert incident.culprit.rank == 0
    assert incident.knows_its_cause


def test_of_two_causes_the_first_counts_and_one_that_was_killed_before_both() -> None:
    two = [failed(0, "KeyError: 'x'", time=5.0), failed(1, "ValueError: y", time=4.0)]
    assert Incident("failed", two).culprit.rank == 1
    assert Incident("failed", [*two, failed(2, code=-9, time=0.0)]).culprit.rank == 2


def test_where_all_lost_their_peers_one_that_had_ended_is_the_cause() -> None:
    incident = Incident("failed", [failed(0, PEER), facts(1, "done", exit_code=0)])
    assert incident.culprit.rank == 1
    assert not incident.knows_its_cause
    assert "rank 1 ended while others still waited for it; rank 0 then failed" in describe(
        incident, 2, "logs"
    )


def test_where_all_lost_their_peers_and_none_had_ended_the_cause_lies_elsewhere() -> None:
    incident = Incident("failed", [failed(0, PEER)])
    assert not incident.knows_its_cause
    assert "1 more on machines that have not reported" in describe(incident, 2, "logs")


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        # Behind the others.
        ([facts(0, "running", step=5, call="data"), facts(1, "running", step=4, call="sum")], 1),
        # In the same step: not the one that waits for the others.
        ([facts(0, "running", step=5, call="gather"), facts(1, "running", step=5, call="data")], 1),
        # All that run wait: one that had ended does not come any more.
        ([facts(0, "running", step=5, call="sum"), facts(1, "done", step=4, call="end")], 1),
        # One that had ended is not a cause where another is at work.
        ([facts(0, "done", step=4, call="end"), facts(1, "running", step=4, call="save")], 1),
        # Seen to stand equally long: the one that has said less.
        ([facts(0, "running", step=3, call="backward", idle=8.0, marks=12),
          facts(1, "running", step=3, call="update", idle=8.0, marks=11)], 1),
        # None has begun a step: the one that stands longest.
        ([facts(0, "running", idle=3.0), facts(1, "running", idle=9.0)], 1),
    ],
)  # fmt: skip
def test_the_rank_that_holds_up_the_others_is_named(ranks: list[RankFacts], culprit: int) -> None:
    assert Incident("stalled", ranks).culprit.rank == culprit


def test_one_that_left_is_no_cause_where_another_failed() -> None:
    left = failed(0, code=75, time=0.0)
    incident = Incident("failed", [left, failed(1, "KeyError: 'x'", time=5.0)])
    assert incident.culprit.rank == 1
    assert exit_code(incident) == 1
    assert "rank 0 (machine 0): had saved and exited on request" in describe(incident, 2, "logs")
    assert exit_code(Incident("failed", [left, failed(1, code=-9, time=5.0)])) == 137


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (-9, 137), (-15, 143)])
def test_the_exit_code_is_the_culprits(code: int, expected: int) -> None:
    assert exit_code(Incident("failed", [failed(0, PEER), failed(1, code=code)])) == expected


def test_after_an_exception_the_code_is_pythons_though_the_process_aborted_later() -> None:
    assert exit_code(Incident("failed", [failed(0, "ValueError: x", code=-6)])) == 1


def test_a_stall_and_an_unknown_cause_have_codes_of_their_own() -> None:
    assert exit_code(Incident("stalled", [facts(0, "running")])) == 124
    assert exit_code(Incident("abandoned", [])) == 1


@pytest.mark.parametrize("other", [facts(1, "running"), failed(1, TIMED_OUT, time=2.0)])
def test_ranks_that_waited_longer_than_a_collective_may_take_end_with_that_of_a_stall(
    other: RankFacts,
) -> None:
    assert exit_code(Incident("failed", [failed(0, TIMED_OUT), other])) == 124
    assert exit_code(Incident("failed", [failed(0, TIMED_OUT), failed(1, "KeyError: 'x'")])) == 1
    assert exit_code(Incident("failed", [failed(0, TIMED_OUT)], [LostMachine(1, "b", 40.0)])) == 69


def test_an_incident_survives_its_way_to_another_machine() -> None:
    incident = Incident("stalled", [failed(0, PEER, step=3, call="sum", stacks="File x", idle=2.5)])
    assert Incident.from_json(json.loads(json.dumps(incident.to_json()))) == incident


def test_accounts_of_machines_are_joined_and_the_one_that_knows_more_counts() -> None:
    ours, theirs = (
        Incident("abandoned", [facts(0, "running")]),
        Incident("failed", [failed(1, "E: x")]),
    )
    joined = ours.joined_with(theirs)
    assert (joined.kind, joined.culprit.rank) == ("failed", 1)
    assert Incident("failed", []).joined_with(Incident("stalled", [])).kind == "stalled"


def test_the_report_leaves_out_how_the_script_was_brought_to_run() -> None:
    stacks = (
        'Thread 1:\n  File "/a/train.py", line 3 in main\n  File "<frozen runpy>", line 88 in _run_code\n'
    )
    text = describe(Incident("stalled", [facts(0, "running", stacks=stacks)]), 1, "logs")
    assert "train.py" in text
    assert "runpy" not in text


def test_a_failure_that_explains_itself_is_not_buried_under_the_stacks_of_others() -> None:
    ranks = [facts(0, "failed", exit_code=2), facts(1, "running", stacks="File waits")]
    assert "File waits" not in describe(Incident("failed", ranks), 2, "logs")
    assert "File waits" in describe(Incident("stalled", ranks), 2, "logs")


def test_long_messages_are_quoted_whole_once_and_shortened_in_the_list() -> None:
    text = describe(Incident("failed", [failed(0, "ValueError: " + "word " * 100)]), 1, "logs")
    headline, listed = (line for line in text.splitlines() if "ValueError" in line)
    assert len(headline) > 500
    assert len(listed) < 220
    assert listed.endswith("...")
