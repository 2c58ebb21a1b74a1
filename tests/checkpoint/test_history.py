"""A long `log_history` in checkpoints: complete, in segments that are written once."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.test_malicious import reseal
from tests.docs.plain_reader import PlainReader

from windlass.checkpoint import history
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.history import HistoryKeeper, complete_state
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.events import TrainerState

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SEGMENT_ROWS", 10)


def rows(first: int, count: int) -> Rows:
    return [{"loss": 1 / (number + 1), "step": number} for number in range(first, first + count)]


class Run:
    """Saves a history, as a run does."""

    def __init__(self, root: Path, files: Files | None = None, limit: int | None = None) -> None:
        self.keeper, self.step = HistoryKeeper(), 0
        self.manager = CheckpointManager(Store(root, files=files), Retention(limit))

    def save(self, log_history: Any) -> Checkpoint:
        self.step += 1
        planned = self.keeper.plan({"global_step": self.step, "log_history": log_history})
        folder = self.manager.save(
            self.step, Content(shared=planned.states, history=planned).encoded(), meta={}
        )
        assert folder is not None
        self.keeper.saved(folder)
        return self.manager.load(folder)


def segments(checkpoint: Checkpoint) -> list[str]:
    return sorted(name for name in checkpoint.info.files if name.startswith("log_history/"))


def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the segments that are written from here on, rather than linked."""
    names, write = [], Files.write

    def noted(self: Files, path: Path, chunks: Any) -> Any:
        if path.suffix == ".jsonl":
            names.append(path.name)
        return write(self, path, chunks)

    monkeypatch.setattr(Files, "write", noted)
    return names


def test_what_is_saved_is_complete_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, run, logged = written(monkeypatch), Run(tmp_path, limit=1), Rows()
    for _ in range(9):
        logged += rows(len(logged), 7)
        checkpoint = run.save(logged)
        assert complete_state(checkpoint)["log_history"] == logged
        newest = json.loads((checkpoint.folder / "trainer_state.json").read_text())["log_history"]
        assert newest == logged[-len(newest) :]
        assert len(newest) >= min(10, len(logged))
        assert len(newest) < 20
        for reads in (checkpoint.folder, checkpoint.folder / "trainer_state.json"):
            assert TrainerState.load_from_json(str(reads)).log_history == logged
        assert PlainReader(checkpoint.folder).log_history() == logged
    assert names == [f"{first:09d}.jsonl" for first in range(0, 50, 10)]
    assert os.listdir(tmp_path) == ["checkpoint-9"]  # what it links to outlives the removed ones


def test_a_short_history_lies_in_the_state_alone(tmp_path: Path) -> None:
    checkpoint = Run(tmp_path).save(rows(0, 19))
    assert set(checkpoint.info.files) == {"trainer_state.json", "rank-00000.json"}
    assert checkpoint.shared("trainer_state")["log_history"] == rows(0, 19)


def replaced(logged: Rows) -> Rows:
    return [*logged[:23], {"step": 23}, *logged[24:]]


def inserted(logged: Rows) -> Rows:
    return [*logged[:3], {"mine": 1}, *logged[3:]]


def removed(logged: Rows) -> Rows:
    return [*logged[:12], *logged[13:]]


def cut(logged: Rows) -> Rows:
    return [*logged[:25], *rows(25, 40)]


def emptied(logged: Rows) -> Rows:
    return []


def edited_at_its_end(logged: Rows) -> Rows:
    logged[-1]["mine"] = 1
    logged[-3].clear()
    return logged


def nested(logged: Rows) -> Rows:
    logged[-1]["mine"] = [1]
    return logged


@pytest.mark.parametrize(
    "change", [replaced, inserted, removed, cut, emptied, edited_at_its_end, nested, rows]
)
def test_what_a_script_changes_is_saved_as_it_is_then(change: Any, tmp_path: Path) -> None:
    run, logged = Run(tmp_path), rows(0, 45)
    run.save(logged)
    changed = rows(0, 31) if change is rows else change(logged)
    assert complete_state(run.save(changed))["log_history"] == changed
    if change is nested:
        changed[-1]["mine"].append(2)
    changed += rows(100, 30)
    assert complete_state(run.save(changed))["log_history"] == changed


def test_values_that_json_lacks(tmp_path: Path) -> None:
    odd = [{"a": math.inf, "b": (1, 2), "c": {1: "x"}, "d": "line\nbreak \u2028", "e": None}] * 45
    state = complete_state(Run(tmp_path).save(odd))
    assert state["log_history"] == odd


def test_tensors_become_numbers_and_the_rest_becomes_text(tmp_path: Path) -> None:
    run, logged = Run(tmp_path), rows(0, 45)
    run.save(logged)
    logged += [{"t": torch.ones(2), "inf": math.inf}, {"x": {1, 2}, "at": Path("/x")}, 1j, *rows(48, 30)]
    kept = [{"t": [1.0, 1.0], "inf": math.inf}, {"x": [1, 2], "at": "/x"}, "1j"]
    checkpoint = run.save(logged)
    assert complete_state(checkpoint)["log_history"] == [*logged[:45], *kept, *logged[48:]]
    assert segments(checkpoint)[-1].endswith("50.jsonl")


def test_rows_of_many_bytes_make_segments_of_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SEGMENT_BYTES", 300)
    logged = (
        [{"text": "x" * 100, "step": number} for number in range(17)] + [{"text": "y" * 1000}] + rows(0, 4)
    )
    checkpoint = Run(tmp_path).save(logged)
    assert len(segments(checkpoint)) > 3
    assert complete_state(checkpoint)["log_history"] == logged


def test_a_failed_save_leaves_nothing_out(tmp_path: Path) -> None:
    run, logged = Run(tmp_path), rows(0, 45)
    run.keeper.plan({"global_step": 0, "log_history": logged})  # of a save that was dropped
    logged += rows(45, 10)
    assert complete_state(run.save(logged))["log_history"] == logged


class NoLinks(Files):
    def link(self, source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")


def test_without_hard_links_segments_are_copied(tmp_path: Path) -> None:
    run, logged = Run(tmp_path, NoLinks()), rows(0, 45)
    first = run.save(logged)
    second = run.save(logged)
    assert segments(first) == segments(second) != []
    for name in segments(first):
        assert not os.path.samefile(first.folder / name, second.folder / name)
    assert complete_state(second)["log_history"] == logged


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("damage", ["gone", "edited", "folder gone"])
def test_a_damaged_segment_is_written_again(damage: str, links: bool, tmp_path: Path) -> None:
    run, logged = Run(tmp_path, None if links else NoLinks()), rows(0, 45)
    first = run.save(logged)
    path = first.folder / segments(first)[1]
    if damage == "gone":
        path.unlink()
    elif damage == "edited":
        path.write_bytes(path.read_bytes().replace(b"12", b"21"))
    else:
        shutil.rmtree(first.folder)
    assert complete_state(run.save(logged))["log_history"] == logged


def test_a_segment_that_is_changed_after_the_verification_is_refused(tmp_path: Path) -> None:
    checkpoint = Run(tmp_path).save(rows(0, 45))
    path = checkpoint.folder / segments(checkpoint)[1]
    path.write_bytes(path.read_bytes().replace(b"12", b"21"))
    with pytest.raises(CheckpointError, match=r"000000010\.jsonl is damaged"):
        complete_state(checkpoint)


def test_a_resumed_run_goes_on_with_the_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, logged = Run(tmp_path / "first"), rows(0, 45)
    checkpoint = run.save(logged)
    for root in (tmp_path / "first", tmp_path / "second"):  # in the same folder, and in another one
        other = Run(root)
        other.step = 1
        logged = complete_state(checkpoint)["log_history"]
        other.keeper.resume(checkpoint, logged)
        names = written(monkeypatch)
        logged += rows(45, 20)
        assert complete_state(other.save(logged))["log_history"] == logged
        assert names == ["000000030.jsonl", "000000040.jsonl"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log_history.json", {"rows": 45}),
        ("log_history.json", {"rows": 45, "segments": [{"file": "../x", "rows": 10}]}),
        ("log_history.json", {"rows": 45, "segments": [{"file": "log_history/000000000.jsonl", "rows": 45}]}),
        ("log_history.json", {"rows": 45, "segments": [{"file": "log_history/000000000.jsonl", "rows": 10}] * 3}),
        ("log_history.json", {"rows": 45, "segments": [{"file": "log_history/000000000.jsonl", "rows": 10}]}),
        ("log_history/000000010.jsonl", {}),
        ("log_history/000000010.jsonl", [1]),
    ],
)  # fmt: skip
def test_what_another_program_wrote_there_is_refused(name: str, content: Any, tmp_path: Path) -> None:
    folder = Run(tmp_path).save(rows(0, 45)).folder
    (folder / name).write_text(json.dumps(content))
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"log_history|000000010"):
        complete_state(CheckpointManager(Store(tmp_path)).load(folder))


def test_a_run_that_links_does_not_spoil_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link changes the inode of a segment, and nothing of its content."""
    checkpoint = Run(tmp_path).save(rows(0, 45))
    from windlass.checkpoint import files

    digest, changes = files.digest_of, iter(range(3))

    def linked(file: Any) -> Any:
        for number in changes:
            os.link(checkpoint.folder / "trainer_state.json", tmp_path / f"{number}")
            os.link(checkpoint.folder / segments(checkpoint)[0], tmp_path / f"segment {number}")
            break
        return digest(file)

    monkeypatch.setattr(files, "digest_of", linked)
    assert Store(tmp_path).verify(checkpoint.folder).seen
