"""What a damaged record leaves of a run: everything else is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.test_report import failed_run

from windlass.callbacks.clock_file import CLOCK
from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_record import RECORD
from windlass.callbacks.run_view import read_run
from windlass.core.upload_log import UPLOADS


@pytest.mark.parametrize("changed", [1, [1], {"learning_rate": 0.1}, {"learning_rate": [0.1]}])
def test_changed_arguments_that_are_no_pairs_are_left_out(tmp_path: Path, changed: Any) -> None:
    failed_run(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    record["sessions"] *= 2
    record["sessions"][-1] = {**record["sessions"][-1], "changed": changed}
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert "failed at" in render_page([summarised(read_run(tmp_path))])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            {"sessions": [{"step": 5, "seconds": {"compute": 10**400}}]}, id="seconds beyond every float"
        ),
        pytest.param({"process": "python"}, id="a process that is a text"),
    ],
)
def test_a_damaged_record_is_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    failed_run(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    if "sessions" in damage:
        damage = {"sessions": [record["sessions"][-1] | damage["sessions"][0]]}
    (tmp_path / RECORD).write_text(json.dumps(record | damage))
    assert "it is left out" in read_run(tmp_path).notes[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_in_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    failed_run(tmp_path)
    for name in ("samples.json", "answers.jsonl", CLOCK, UPLOADS, ".windlass-failure-0.json"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    assert "failed at" in render_page([summarised(read_run(tmp_path))])


def test_scores_beyond_every_float_are_not_shown(tmp_path: Path) -> None:
    failed_run(tmp_path)
    answer = {"step": 5, "prompt": "What?", "answer": "That.", "scores": {"f1": 10**400, "exact": 1.0}}
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    page = render_page([summarised(read_run(tmp_path))])
    assert "exact 1" in page
    assert "f1" not in page
