"""What a watch of processes sees: which ended, which stall, which deserted, and the facts of an incident."""

from __future__ import annotations

import json
import time
from pathlib import Path

from windlass.cli.launching.failure_report import Watch, Watched
from windlass.dist.beacon import LitBeacon, Lookout, mark_path


def failed(folder: Path, rank: int, **extra: object) -> Watched:
    """A process that ended with exit code 1, and recorded an exception."""
    path = folder / f"error-{rank}.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    return Watched(rank, 0, lambda: 1, str(path), Lookout(folder, rank))


def test_failures_are_ordered_by_the_clock_that_the_ranks_share(tmp_path: Path) -> None:
    now = time.monotonic()
    # The wall clock was set back an hour between the two failures.
    first = failed(tmp_path, 1, monotonic=now - 2, timestamp=str(int(time.time())))
    second = failed(tmp_path, 0, monotonic=now - 1, timestamp=str(int(time.time()) - 3600))
    incident = Watch(0, [second, first]).incident("failed")
    assert incident.culprit is not None
    assert incident.culprit.rank == 1


def test_an_error_file_of_torch_has_the_wall_clock_alone(tmp_path: Path) -> None:
    (facts,) = Watch(0, [failed(tmp_path, 0, timestamp="1700000000")]).incident("failed").ranks
    assert (facts.time, facts.message) == (1700000000.0, "ValueError: x")


def test_a_slow_start_of_all_ranks_is_no_stall_of_the_second_to_report(tmp_path: Path) -> None:
    beacons = [LitBeacon(mark_path(tmp_path, rank)) for rank in range(2)]
    watch = Watch(0, [Watched(rank, 0, lambda: None, "", Lookout(tmp_path, rank)) for rank in range(2)])
    assert not watch.stalled(2, now=0)
    assert not watch.stalled(2, now=100)
    beacons[0].call("sum", 0)
    assert not watch.stalled(2, now=101)
    assert watch.stalled(2, now=103)
