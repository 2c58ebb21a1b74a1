"""A page that follows runs gets what is new, and what it costs depends on that alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.page_runs import append_rows, row, write_run

from windlass.callbacks.page_data import page_data
from windlass.callbacks.row_file import cut_back
from windlass.callbacks.run_view import read_run
from windlass.cli.followed_runs import FollowedRuns


def logged(step: int) -> dict[str, Any]:
    return row(step, loss=1.0 / step, grad_norm=2.0, learning_rate=0.1, num_input_tokens_seen=step * 512)


def following(folder: Path) -> FollowedRuns:
    """What follows a page of a run, after its first look."""
    page = FollowedRuns([folder])
    page.whole()
    followed = FollowedRuns([folder], [page.position])
    followed.look()
    return followed


def test_new_rows_are_sent_and_no_others(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    page = FollowedRuns([tmp_path])
    page.whole()
    append_rows(tmp_path, logged(51))  # before the page has asked for what is new
    followed = FollowedRuns([tmp_path], [page.position])
    (first,) = followed.look()["runs"]
    assert first["growth"]["series"]["loss"] == {
        "s": [51], "v": [1 / 51], "t": [51.0], "k": [51 * 512], "bad": 0, "of": 1
    }  # fmt: skip
    assert first["growth"]["clip"] == {"at": 1.0, "over": 1, "of": 1}
    append_rows(tmp_path, row(52, loss=0.5), row(52, skipped_update=52, reason="NaN"))
    found = followed.look()
    (second,) = found["runs"]
    assert list(second["growth"]["series"]) == ["loss"]
    assert second["growth"]["series"]["loss"]["k"] == [51 * 512], "tokens of the row before"
    assert [mark["kind"] for mark in second["marks"]] == ["evaluation", "skipped_update"]
    assert "attempts" in second
    assert "step 52 of 50" in found["sections"]["header"]
    assert "run-0-settings" not in found["sections"], "they did not change"
    again = followed.look()
    assert again["runs"] == [{"growth": {"series": {}, "clip": None}}]


def test_a_page_of_other_rows_gets_all(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    followed = following(tmp_path)
    cut_back(tmp_path / "metrics.jsonl", 4)
    append_rows(tmp_path, logged(5))
    (found,) = followed.look()["runs"]
    assert found["whole"] == page_data(read_run(tmp_path))
    for position in ("", "1-2-3", "0-0-0", "x", "f" * 99, "1-fffffffffffffff-3"):
        (found,) = FollowedRuns([tmp_path], [position]).look()["runs"]
        assert found["whole"] == page_data(read_run(tmp_path))


def test_state_and_tables_are_those_of_all_rows(tmp_path: Path) -> None:
    write_run(tmp_path, 300)
    followed = following(tmp_path)
    append_rows(tmp_path, *(logged(step) for step in range(301, 340)), row(339, "evaluate", eval_loss=0.25))
    found = followed.look()["sections"]
    whole = FollowedRuns([tmp_path]).look()["sections"]
    assert found == {key: text for key, text in whole.items() if key in found}
    assert {"header", "run-0-tiles", "run-0-evaluations", "run-0-metrics"} <= found.keys()


def calls_of(followed: FollowedRuns) -> tuple[int, int]:
    """(calls of functions, bytes that are sent) of one look."""
    calls = 0

    def count(frame: Any, event: str, value: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = followed.look()
    finally:
        sys.setprofile(None)
    return calls, len(json.dumps(found))


@pytest.mark.parametrize("rows", [1, 20])
def test_a_look_costs_what_is_new_however_long_the_run_is(tmp_path: Path, rows: int) -> None:
    found = []
    for name, steps in (("short", 200), ("long", 6000)):
        write_run(tmp_path / name, steps)
        followed = following(tmp_path / name)
        append_rows(tmp_path / name, *(logged(steps + more) for more in range(1, rows + 1)))
        found.append(calls_of(followed))
    (calls, size), (calls_of_long, size_of_long) = found
    assert calls_of_long == pytest.approx(calls, rel=0.05)
    assert size_of_long == pytest.approx(size, rel=0.1)
    assert size_of_long < 6000 + 600 * rows
