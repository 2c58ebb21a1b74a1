"""A page that follows runs gets what is new, and what it costs depends on that alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.page_runs import BEGAN, append_rows, row, write_run

from windlass.callbacks import metrics_log
from windlass.callbacks.page_data import page_data
from windlass.callbacks.row_file import cut_back
from windlass.callbacks.run_view import RunView, read_run
from windlass.cli import followed_runs
from windlass.cli.followed_runs import FollowedRuns, RunHistory, kept_histories
from windlass.core.errors import DataError


def logged(step: int) -> dict[str, Any]:
    return row(step, loss=1.0 / step, grad_norm=2.0, learning_rate=0.1, num_input_tokens_seen=step * 512)


def following(folder: Path) -> FollowedRuns:
    """What follows a page of a run, after its first look."""
    history = RunHistory(folder)
    followed = FollowedRuns([history], [history.page()[1]])
    followed.look()
    return followed


def test_new_rows_are_sent_and_no_others(tmp_path: Path) -> None:
    write_run(tmp_path, 50)
    history = RunHistory(tmp_path)
    _, position = history.page()
    append_rows(tmp_path, logged(51))  # before the page has asked for what is new
    history.view()  # another page has
    followed = FollowedRuns([history], [position])
    (first,) = followed.look()["runs"]
    assert first["growth"]["series"]["loss"] == {
        "s": [51], "v": [1 / 51], "t": [51.0], "k": [51 * 512], "bad": 0
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
    for position in ("", "1-2-3", "x", "f" * 99, "1-fffffffffffffff-3"):
        (found,) = FollowedRuns([RunHistory(tmp_path)], [position]).look()["runs"]
        assert found["whole"] == page_data(read_run(tmp_path))


def test_state_and_tables_are_those_of_all_rows(tmp_path: Path) -> None:
    write_run(tmp_path, 300)
    followed = following(tmp_path)
    append_rows(tmp_path, *(logged(step) for step in range(301, 340)), row(339, "evaluate", eval_loss=0.25))
    found = followed.look()["sections"]
    whole = FollowedRuns([RunHistory(tmp_path)]).look()["sections"]
    assert found == {key: text for key, text in whole.items() if key in found}
    assert {"header", "run-0-tiles", "run-0-evaluations", "run-0-metrics"} <= found.keys()


def test_each_row_is_read_once_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 5000)
    read: list[int] = []
    parsed = metrics_log._parsed
    monkeypatch.setattr(
        metrics_log, "_parsed", lambda lines, first: (read.append(len(lines)), parsed(lines, first))[1]
    )
    history_of = kept_histories()
    pages = [history_of(tmp_path).page() for _ in range(3)]
    history_of(tmp_path).view()
    append_rows(tmp_path, logged(5001))
    followers = [FollowedRuns([history_of(tmp_path)], [position]) for _, position in pages]
    found = [one.look()["runs"][0]["growth"]["series"]["loss"]["s"] for one in followers]
    assert found == [[5001]] * 3
    assert sum(read) == 5002, "and the evaluation"
    page, _ = history_of(tmp_path).page()
    assert page.data is not None
    loss, fresh = page.data["series"]["loss"], page_data(read_run(tmp_path))["series"]["loss"]
    assert (loss["s"][-1], max(loss["v"]), min(loss["v"])) == (5001, max(fresh["v"]), min(fresh["v"]))
    assert page.data["clip"] == page_data(read_run(tmp_path))["clip"]
    assert page.data["clip"]["of"] == 5001


def test_a_page_that_was_away_for_long_gets_all(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    history = RunHistory(tmp_path)
    followed = FollowedRuns([history], [history.page()[1]])
    for first in range(11, 3011, 1000):
        append_rows(tmp_path, *(logged(step) for step in range(first, first + 1000)))
        history.view()
    (found,) = followed.look()["runs"]
    assert found["whole"]["clip"]["of"] == 3010
    (found,) = followed.look()["runs"]
    assert found["growth"] == {"series": {}, "clip": None}


def test_rows_of_a_look_that_failed_are_on_the_next_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, 10)
    history = RunHistory(tmp_path)
    history.view()
    append_rows(tmp_path, logged(11))

    def stale(run: Path, whole: Any = None) -> RunView:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(followed_runs, "read_run", stale)
        with pytest.raises(DataError, match=r"cannot be read: .*Stale"):
            history.view()
    assert history.page()[0].data == page_data(read_run(tmp_path))


def test_norms_are_counted_as_in_a_page_of_all_rows_though_attempts_clip_differently(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    history = RunHistory(tmp_path)
    history.view()
    before, path = 1.0, tmp_path / "run.json"
    for first, limit in ((11, 0.0), (21, 1.5)):
        record = json.loads(path.read_text())
        record["arguments"]["max_grad_norm"] = limit
        changed = {"max_grad_norm": [before, limit]}
        record["sessions"].append(
            {"began": BEGAN + first - 0.5, "from_step": first - 1, "repeated": 0, "changed": changed}
        )
        path.write_text(json.dumps(record))
        append_rows(tmp_path, *(logged(step) for step in range(first, first + 10)))
        page, _ = history.page()
        assert page.data is not None
        assert page.data["clip"] == page_data(read_run(tmp_path))["clip"]
        assert (page.data["clip"] is None) is (limit == 0)
        before = limit
    assert page.data["clip"] == {"at": 1.5, "over": 10, "of": 30}


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
