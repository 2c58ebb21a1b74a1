"""A rank that fails while a collective is under way ends at once, with its own exit code, and so do the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import ROOT

from windlass.dist.ending import lost_another_rank

HANG = 60  # seconds; the groups' own limit is 600


def ends_of(script: Path, *arguments: str, ranks: int = 2) -> list[tuple[int, str]]:
    """Run `script` on ranks that no launcher ends when one of them fails; return exit codes, and what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={
                **os.environ,
                **job,
                "LOCAL_WORLD_SIZE": str(ranks),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=HANG)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.dist
@pytest.mark.parametrize(("ends", "code"), [("after leave", 1), ("caught", 3)])
def test_a_rank_that_failed_does_not_wait_for_a_sum_that_no_other_rank_joins(ends: str, code: int) -> None:
    (own, said), (other, lost) = ends_of(Path(__file__).with_name("failing_rank.py"), ends)
    assert own == code, said
    assert ("ValueError: my own mistake" in said) == (code == 1)
    assert other == 1, lost
    assert "Connection closed by peer" in lost or "Connection reset by peer" in lost
    assert "terminate called" not in said + lost


@pytest.mark.dist
def test_ranks_that_train_after_an_error_end_well(tmp_path: Path) -> None:
    for code, said in ends_of(Path(__file__).with_name("recovered_rank.py"), str(tmp_path)):
        assert code == 0, said
        assert "trained 4" in said


@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("failing_ranks.py", "ValueError: a callback's own mistake"),
        # The sum of counts that the failing rank began is one that the other has not joined.
        ("slow_data_ranks.py", "ValueError: my own mistake"),
        # The other one waits in the exchange of the next weight of a checkpoint.
        ("failing_gather.py", "MemoryError: no memory for it"),
        # The other one waits within the forward: a report between two batches would meet it there.
        ("failing_divided_rows.py", "ValueError: my own mistake"),
    ],
)
def test_an_error_of_one_rank_ends_both(script: str, error: str, tmp_path: Path) -> None:
    (other, lost), (own, said) = ends_of(ROOT / "tests" / "trainer" / script, str(tmp_path))
    assert (own, other) == (1, 1), said + lost
    assert error in said
    assert "Another rank ended first" in lost
    if script == "failing_ranks.py":
        assert "This was rank 1 of 2, at step 2." in said


def test_the_error_of_a_lost_connection_is_known() -> None:
    assert lost_another_rank(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4"))
    assert not lost_another_rank(ValueError("my own mistake"))
