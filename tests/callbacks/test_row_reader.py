"""Rows are read whole and once each, whatever else is in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.callbacks.page_runs import append_rows, row, write_run

from windlass.callbacks.metrics_log import RowTail, read_rows, whole_rows
from windlass.callbacks.row_file import cut_back
from windlass.core.errors import DataError

GOOD = json.dumps(row(1, loss=2.0))
LINES = (
    GOOD, GOOD, GOOD, json.dumps(row(2, loss="NaN")), "", "{", "[1]", "null", '{"a": [{}', '{}]}', '{"a": "}', '{"}',
    '{"step": 1}', '{"step": true, "timing": {"wall": 1.0}}', '{"step": 1, "timing": {"wall": 1.0, "elapsed": "x"}}',
)  # fmt: skip


@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_lines_that_are_parsed_together_are_those_that_are_parsed_alone(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "all").write_text("".join(f"{line}\n" for line in lines))
    rows, damage = whole_rows(folder / "all")
    alone = []
    for line in lines:
        (folder / "one").write_text(f"{line}\n")
        alone.append(whole_rows(folder / "one"))
    assert str(rows) == str([one for found, _ in alone for one in found])
    assert len(damage) == sum(len(found) for _, found in alone)
    named = [int(problem.split(":")[0].removeprefix("line ")) for problem in damage]
    assert named == [number for number, (_, found) in enumerate(alone, start=1) if found]


def test_a_tail_reads_each_row_once(tmp_path: Path) -> None:
    tail = RowTail(tmp_path / "metrics.jsonl")
    assert tail.read().rows == []
    rows = write_run(tmp_path, 3)
    assert tail.read().rows == rows
    assert tail.read() == tail.read()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(GOOD[:20])
        file.flush()
        found = tail.read()
        assert (found.rows, found.continues) == ([], True)
        assert found.damage == ["line 5: an unfinished line"]
        file.write(GOOD[20:] + "\nbroken\n")
    found = tail.read()
    assert found.rows == [json.loads(GOOD)]
    assert found.damage == ["line 6: not a JSON object: 'broken'"]
    assert tail.read().damage == found.damage


def test_a_tail_begins_again_with_a_file_that_was_cut_back_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = write_run(tmp_path, 10)
    tail = RowTail(path)
    tail.read()
    cut_back(path, 4)
    found = tail.read()
    assert (found.rows, found.continues) == (rows[:4], False)
    position = tail.position
    # The same number of the file, and longer than before: its content alone tells that it is another one.
    with open(path, "r+b") as file:
        file.seek(-len(json.dumps(rows[3])), os.SEEK_END)
        file.write(json.dumps(row(9)).encode()[:20])
    append_rows(tmp_path, row(5, loss=1.0))
    found = tail.read()
    assert not found.continues
    assert tail.position != position
    path.unlink()
    assert not tail.read().continues
    assert not RowTail(path).read().rows


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    append_rows(tmp_path, row(1))
    (tmp_path / "metrics.jsonl").open("a").write("[]\n")
    with pytest.raises(DataError, match="line 2: not a JSON object"):
        read_rows(tmp_path)
