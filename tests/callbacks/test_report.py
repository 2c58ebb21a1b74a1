"""The report on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.callbacks.report import ReportCallback, write_report
from windlass.callbacks.run_record import RECORD, RunRecord
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import DataError
from windlass.core.events import TrainerControl, TrainerState

NOTHING = {"from_step": 0, "seconds": 0.0, "samples": 0.0}


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True)


def state_of(**changes: Any) -> TrainerState:
    return TrainerState(**{"global_step": 5, "max_steps": 5, **changes})


def log_run(folder: Path, *, max_steps: int = 5, data: dict[str, Any] | None = None) -> RunRecord:
    """Write the files of a run that logged step 5, and return its record, which has no end yet."""
    record = RunRecord(folder, arguments(folder), writes=True)
    record.begin(0, max_steps, NOTHING, lambda: data or {})
    log, state, control = MetricsLogCallback(folder), TrainerState(max_steps=max_steps), TrainerControl()
    log.on_train_begin(None, state, control)
    state.global_step, state.epoch = 5, 1.0
    log.on_log(None, state, control, logs={"loss": 2.0, "learning_rate": 1e-4})
    log.on_log(None, state, control, logs={"eval_loss": 1.5})
    return record


def failed_run(folder: Path) -> None:
    log_run(folder).end("failed", 5, NOTHING, ValueError("no"))


def report_of(folder: Path) -> None:
    write_report(folder, folder, runs=False, picture=False)


def test_a_page_at_each_save_and_a_picture_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    record, callback = log_run(folder, max_steps=10), ReportCallback
    callback().on_save(arguments(folder), state_of(max_steps=10), TrainerControl())
    page = folder / "report.html"
    assert "running, step 5 of 10; last row at 20" in page.read_text()
    assert "<h1>run-1</h1>" in page.read_text()
    record.end("finished", 5, {"from_step": 0, "seconds": 2.0, "samples": 40.0})
    callback().on_train_end(arguments(folder), state_of(), TrainerControl())
    assert "finished after 5 steps" in page.read_text()
    assert "20 samples per second" in page.read_text()
    names = {path.name for path in folder.iterdir()}
    assert names <= {"report.html", "training.png", "metrics.jsonl", RECORD}  # nothing half-written is left


@pytest.mark.parametrize(
    ("status", "error", "shown"),
    [
        ("stopped", None, "stopped at step 5 of 10 at 20"),
        ("preempted", None, "preempted at step 5 of 10 at 20"),
        ("failed", RuntimeError("no more\nlines"), "RuntimeError: no more<"),
        ("failed", OSError("https://me:secret@host"), "https://***@host"),
    ],
)
def test_a_run_that_ended_early_says_so(
    tmp_path: Path, status: str, error: Exception | None, shown: str
) -> None:
    log_run(tmp_path, max_steps=10).end(status, 5, NOTHING, error)
    ReportCallback().on_train_end(arguments(tmp_path), state_of(max_steps=10), TrainerControl())
    assert shown in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("runs", "shown"),
    [
        (True, "running, step 5 of 10; "),
        (False, "killed after step 5 of 10; "),
        (None, "running or killed, step 5 of 10; "),
    ],
)
def test_a_run_without_an_end_has_the_time_of_its_last_row(
    tmp_path: Path, runs: bool | None, shown: str
) -> None:
    log_run(tmp_path, max_steps=10)
    write_report(tmp_path, tmp_path, runs=runs, picture=False)
    assert f"{shown}last row at 20" in (tmp_path / "report.html").read_text()


def test_the_rows_alone_make_a_page_too(tmp_path: Path) -> None:
    log_run(tmp_path)
    (tmp_path / RECORD).unlink()
    write_report(tmp_path, tmp_path / "elsewhere", runs=False, picture=False)
    page = (tmp_path / "elsewhere" / "report.html").read_text()
    assert "step 5; last row at 20" in page
    assert "Training time" not in page
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"max_steps": 5, "sessions": []}', "\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    log_run(tmp_path)
    (tmp_path / RECORD).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"run\.json"):
        write_report(tmp_path, tmp_path, runs=False)


@pytest.mark.parametrize("row", ['{"event": "log", "step": 1}', '{"step": "x", "timing": {"wall": 1}}'])
def test_a_damaged_row_is_named(tmp_path: Path, row: str) -> None:
    log_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(row + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 3"):
        write_report(tmp_path, tmp_path, runs=False)


def test_a_complete_run_that_is_resumed_keeps_its_report(tmp_path: Path) -> None:
    record, args, state = log_run(tmp_path), arguments(tmp_path), state_of()
    record.end("finished", 5, NOTHING)
    callback = ReportCallback()
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_train_end(args, state, TrainerControl())  # there was none
    (tmp_path / "report.html").write_text("the report")
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_train_end(args, state, TrainerControl())
    assert (tmp_path / "report.html").read_text() == "the report"


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from windlass.callbacks.report import draw_training

    finished = [
        {"loss": 2.0, "learning_rate": 1e-4, "epoch": 1.0, "step": 5},
        {"eval_loss": 1.5, "step": 5},
    ]
    for history in (finished, [], [{"loss": float("nan"), "step": 1}]):
        path = tmp_path / f"{len(history)}.png"
        draw_training(history, path, "a run")
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1080, 720)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".png"] * 3


def test_matplotlib_is_left_alone_where_its_state_is_global() -> None:
    source = Path(sys.modules["windlass.callbacks.report"].__file__ or "").read_text()
    assert "import pyplot" not in source
    assert "matplotlib.use" not in source


def test_without_matplotlib_a_line_says_how_to_get_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log_run(tmp_path)
    ReportCallback().on_train_end(arguments(tmp_path), state_of(), TrainerControl())
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "training.png").exists()
    assert 'pip install "windlass-trainer[report]"' in log_lines.text


def test_facts_of_the_run_are_on_the_page(tmp_path: Path) -> None:
    log_run(tmp_path / "asked", data={"rows": "twelve"})
    with open(tmp_path / "asked" / "metrics.jsonl", "a") as file:
        row = {"event": "log", "step": 5, "skipped_update": 3, "reason": "NaN", "timing": {"wall": 1.0}}
        file.write(json.dumps(row) + "\n")
    ReportCallback().on_save(arguments(tmp_path / "asked"), state_of(), TrainerControl())
    page = (tmp_path / "asked" / "report.html").read_text()
    assert "update 3 skipped" in page
    assert "<h1>asked</h1>" in page
    assert "twelve" in page
    assert "python" in page


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    state = state_of(is_world_process_zero=False)
    ReportCallback().on_train_end(arguments(tmp_path / "x"), state, TrainerControl())
    RunRecord(tmp_path / "x", arguments(tmp_path), writes=False).begin(0, 5, NOTHING)
    assert not (tmp_path / "x").exists()


def test_a_report_that_fails_never_stops_training(tmp_path: Path, log_lines: Any) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    ReportCallback(tmp_path / "taken").on_save(arguments(tmp_path), state_of(), TrainerControl())
    assert "could not be written" in log_lines.text

    def broken() -> dict[str, Any]:
        raise RuntimeError("no facts today")

    record = RunRecord(tmp_path, arguments(tmp_path), writes=True)
    record.begin(0, 5, NOTHING, broken)
    record.end("finished", 5, NOTHING)
    assert "no facts today" in log_lines.text
