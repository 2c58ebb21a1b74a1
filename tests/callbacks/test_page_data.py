"""What the charts of a page get is what was logged, in columns, and not too much of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.callbacks.page_runs import BEGAN, append_rows, row, write_run

from windlass.callbacks.page_data import page_data
from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_view import read_run
from windlass.core.upload_log import UPLOADS, note_upload


def test_the_columns_are_the_rows(tmp_path: Path) -> None:
    rows = write_run(tmp_path, 5)
    data = page_data(read_run(tmp_path))
    logs = rows[:-1]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert data["series"][name]["v"] == [one[name] for one in logs]
        assert data["series"][name]["s"] == [one["step"] for one in logs]
        assert data["series"][name]["t"] == [one["timing"]["wall"] - BEGAN for one in logs]
        assert data["series"][name]["k"] == [one["num_input_tokens_seen"] for one in logs]
    assert data["series"]["eval_loss"]["v"] == [0.5]
    assert "num_input_tokens_seen" not in data["series"]


def test_norms_above_the_limit_of_their_attempt_are_counted(tmp_path: Path) -> None:
    append_rows(tmp_path, *(row(step, grad_norm=norm) for step, norm in enumerate((0.5, 1.5, 2.5, 2.5), 1)))
    assert page_data(read_run(tmp_path))["clip"] == {"at": 1.0, "over": 3, "of": 4}, "by default at 1"
    (tmp_path / "metrics.jsonl").unlink()
    write_run(tmp_path, 20, max_grad_norm=0.45)
    over = sum((step * 37 % 11) / 10 > 0.45 for step in range(1, 21))
    assert page_data(read_run(tmp_path))["clip"] == {"at": 0.45, "over": over, "of": 20}
    record = json.loads((tmp_path / "run.json").read_text())
    record["arguments"]["max_grad_norm"] = 0.9
    later = {"began": BEGAN + 10.5, "from_step": 10, "repeated": 0, "changed": {"max_grad_norm": [0.45, 0.9]}}
    record["sessions"].append(later)
    (tmp_path / "run.json").write_text(json.dumps(record))
    norms = [(step * 37 % 11) / 10 for step in range(1, 21)]
    over = sum(norm > (0.45 if step <= 10 else 0.9) for step, norm in enumerate(norms, 1))
    assert page_data(read_run(tmp_path))["clip"] == {"at": 0.9, "over": over, "of": 20}
    for nothing in (0, math.inf, "Infinity"):
        record["arguments"]["max_grad_norm"] = nothing
        (tmp_path / "run.json").write_text(json.dumps(record))
        assert page_data(read_run(tmp_path))["clip"] is None


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    append_rows(tmp_path, row(1, loss=2.0), row(2, loss="NaN"), row(3, loss="-Infinity"), row(4, loss=1.0))
    series = page_data(read_run(tmp_path))["series"]["loss"]
    assert (series["s"], series["v"], series["bad"]) == ([1, 4], [2.0, 1.0], 2)


def test_counts_of_tokens_that_are_no_counts_are_left_out(tmp_path: Path) -> None:
    counts = [None, 10**400, "NaN", 512, True]  # of damaged files; the last count stays until the next
    append_rows(
        tmp_path, *(row(step, loss=1.0, num_tokens=count) for step, count in enumerate(counts, start=1))
    )
    assert page_data(read_run(tmp_path))["series"]["loss"]["k"] == [None, None, None, 512.0, 512.0]
    assert "<html" in render_page([summarised(read_run(tmp_path))])


def test_what_happened_once_is_a_mark_and_not_a_point(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    append_rows(tmp_path, row(3, skipped_update=3, reason="NaN"), row(4, micro_batch_too_large=8))
    marks = page_data(read_run(tmp_path))["marks"]
    found = {(one["kind"], one["step"]) for one in marks}
    assert found == {("skipped_update", 3), ("evaluation", 4), ("out_of_memory", 4)}
    assert [one["t"] for one in marks] == [3, 4, 4]
    assert "skipped_update" not in page_data(read_run(tmp_path))["series"]


def test_uploads_are_marks_at_the_step_of_their_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    note_upload(tmp_path, "checkpoint-2", 2)
    note_upload(tmp_path, "the model", None, "no room")
    with open(tmp_path / UPLOADS, "a") as file:
        file.write('{"what": 1}\n{"what": "x", "problem": "", "step": 1, "time": 1.0}\n{"wh')
    marks = page_data(read_run(tmp_path))["marks"]
    found = [(one["kind"], one["step"], one["text"]) for one in marks if "upload" in one["kind"]]
    assert found == [
        ("uploaded", 2, "checkpoint-2 uploaded"),
        ("upload_failed", 4, "the model was not uploaded: no room"),
    ]


@pytest.mark.slow
def test_a_hundred_thousand_rows_stay_below_a_megabyte(tmp_path: Path) -> None:
    write_run(tmp_path, 100_000)
    page = render_page([summarised(read_run(tmp_path))])
    assert len(page.encode()) < 1_000_000
    assert max(len(one["v"]) for one in page_data(read_run(tmp_path))["series"].values()) <= 2000


def test_names_of_metrics_cannot_end_the_data(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    append_rows(tmp_path, row(1, **{evil: 1.0}), row(2, **{evil: 2.0}))
    page = render_page([summarised(read_run(tmp_path))])
    assert evil not in page
    text = page.partition('id="data">')[2].partition("\n")[0].removesuffix("</script>")
    assert not set("<>&") & set(text)
    assert list(json.loads(text)["runs"][0]["series"]) == [evil]
