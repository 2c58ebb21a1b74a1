"""`metrics.jsonl`: what is written, what a resumed run finds, and what damage does to it."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.metrics_log import MetricsLogCallback, read_metrics
from windlass.callbacks.rows import is_timing
from windlass.core.errors import DataError
from windlass.core.events import TrainerControl, TrainerState


def train(folder: Path, steps: int, *, start: int = 0, end: bool = True) -> MetricsLogCallback:
    """Logs each step, evaluates each second one: the events as a Trainer fires them."""
    callback, control = MetricsLogCallback(folder), TrainerControl()
    state = TrainerState(global_step=start, max_steps=steps, epoch=start / 4)
    callback.on_train_begin(None, state, control)
    for step in range(start + 1, steps + 1):
        state.global_step, state.epoch = step, step / 4
        callback.on_log(None, state, control, logs={"loss": 1 / step, "epoch": state.epoch, "step": step})
        if step % 2 == 0:
            metrics = {"eval_loss": 2 / step, "eval_runtime": 0.1 * step}
            callback.on_log(None, state, control, logs=metrics)
            callback.on_evaluate(None, state, control, metrics=metrics)
    if end:
        callback.on_log(None, state, control, logs={"train_runtime": 5.0, "train_loss": 0.5})
        callback.on_train_end(None, state, control)
    return callback


def without_timing(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "timing"} for row in read_metrics(folder / "metrics.jsonl")]


def test_rows_of_a_run(tmp_path: Path) -> None:
    train(tmp_path / "new folder", 2)
    rows = read_metrics(tmp_path / "new folder" / "metrics.jsonl")
    walls = [row["timing"].pop("wall") for row in rows]
    elapsed = [row["timing"].pop("elapsed") for row in rows]
    assert walls == sorted(walls)
    assert elapsed == sorted(elapsed)
    assert rows == [
        {"event": "log", "step": 1, "epoch": 0.25, "loss": 1.0, "timing": {}},
        {"event": "log", "step": 2, "epoch": 0.5, "loss": 0.5, "timing": {}},
        {"event": "evaluate", "step": 2, "epoch": 0.5, "eval_loss": 1.0, "timing": {"eval_runtime": 0.2}},
        {"event": "summary", "step": 2, "epoch": 0.5, "train_loss": 0.5, "timing": {"train_runtime": 5.0}},
    ]


def test_a_resumed_run_ends_with_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    train(tmp_path / "whole", 10)
    for saved in (2, 3, 6, 9, 10):
        folder = tmp_path / f"resumed from {saved}"
        train(folder, 10, end=saved == 10)  # killed after step 10, or finished
        train(folder, 10, start=saved)
        assert without_timing(folder) == without_timing(tmp_path / "whole")
        assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl"]


def test_what_a_resumed_run_says_again_is_written_once(tmp_path: Path) -> None:
    train(tmp_path, 4, end=False)
    before = without_timing(tmp_path)
    callback, state = MetricsLogCallback(tmp_path), TrainerState(global_step=4, max_steps=8, epoch=1.0)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.25})  # the end of the epoch, once more
    assert without_timing(tmp_path) == before
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.26})
    assert without_timing(tmp_path)[:-1] == before


def test_a_run_after_a_resumed_one_that_failed_writes_all_of_its_rows(tmp_path: Path) -> None:
    train(tmp_path, 2, end=False)
    callback, state = MetricsLogCallback(tmp_path), TrainerState(global_step=2, max_steps=4, epoch=0.5)
    callback.on_train_begin(None, state, TrainerControl())  # and it fails: there is no `on_train_end`
    state.global_step, state.epoch = 0, 0.0
    callback.on_train_begin(None, state, TrainerControl())
    state.global_step, state.epoch = 2, 0.5
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.5})
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.5]


def test_a_fresh_run_keeps_the_older_file_under_another_name(tmp_path: Path, log_lines: Any) -> None:
    for steps in (1, 2, 3):
        train(tmp_path, steps)
    assert len(read_metrics(tmp_path / "metrics-1.jsonl")) == 2
    assert len(read_metrics(tmp_path / "metrics-2.jsonl")) == 4
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert "renamed to metrics-2.jsonl" in log_lines.text


def test_evaluation_before_training_belongs_to_the_run(tmp_path: Path) -> None:
    callback, state = MetricsLogCallback(tmp_path), TrainerState()
    callback.on_evaluate(None, state, TrainerControl(), metrics={"eval_loss": 9.0})
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert [row["event"] for row in without_timing(tmp_path)] == ["evaluate", "log"]
    callback.on_train_begin(None, state, TrainerControl())  # training a second time is another run
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_evaluation_that_was_logged_with_more_is_still_one_row(tmp_path: Path) -> None:
    callback, state = MetricsLogCallback(tmp_path), TrainerState(global_step=3)
    metrics = {"eval_loss": math.nan, "eval_runtime": 1.0}
    logs = {**metrics, "epoch": 0.5, "num_input_tokens_seen": 7}
    callback.on_log(None, state, TrainerControl(), logs=logs)
    callback.on_evaluate(None, state, TrainerControl(), metrics=metrics)
    assert len(without_timing(tmp_path)) == 1
    callback.on_evaluate(None, state, TrainerControl(), metrics={**metrics, "eval_runtime": 2.0})
    assert len(without_timing(tmp_path)) == 2


@pytest.mark.parametrize(
    ("logs", "event"),
    [
        ({"loss": 1.0, "train_runtime": 2.0, "train_tokens_per_second": 3.0}, "log"),
        ({"train_runtime": 2.0, "train_loss": 1.0}, "summary"),
        ({"eval_loss": 1.0}, "evaluate"),
        ({"test_loss": 1.0, "test_runtime": 1.0}, "evaluate"),
    ],
)
def test_the_kind_of_a_row(tmp_path: Path, logs: dict[str, float], event: str) -> None:
    MetricsLogCallback(tmp_path).on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert without_timing(tmp_path)[0]["event"] == event


def test_prediction_is_recorded(tmp_path: Path) -> None:
    MetricsLogCallback(tmp_path).on_predict(None, TrainerState(), TrainerControl(), {"test_loss": 1.0})
    assert without_timing(tmp_path) == [{"event": "predict", "step": 0, "epoch": 0.0, "test_loss": 1.0}]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    callback, state = MetricsLogCallback(tmp_path / "x"), TrainerState(is_world_process_zero=False)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    callback.on_evaluate(None, state, TrainerControl(), metrics={"eval_loss": 1.0})
    assert not (tmp_path / "x").exists()


# --- values -------------------------------------------------------------------------------------------------


def written_and_read(folder: Path, value: Any) -> Any:
    MetricsLogCallback(folder).on_log(None, TrainerState(), TrainerControl(), logs={"value": value})
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    return read_metrics(folder / "metrics.jsonl")[-1]["value"]


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_floats_come_back_as_the_same_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    back = written_and_read(tmp_path_factory.mktemp("floats"), value)
    if math.isnan(value):
        assert math.isnan(back)
    else:
        assert struct.pack("d", back) == struct.pack("d", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), float(np.float32(0.1))), (np.array([1, 2]), [1, 2]), (torch.tensor(2.5), 2.5),
        (torch.tensor([1.0, math.inf]), [1.0, math.inf]), ({"a": (1, None)}, {"a": [1, None]}), (True, True),
        (Path("x"), "x"), ("text\nmore", "text\nmore"), (np.float64(math.inf), math.inf),
    ],
)  # fmt: skip
def test_other_values(tmp_path: Path, value: Any, expected: Any) -> None:
    back = written_and_read(tmp_path, value)
    assert back == expected
    assert type(back) is type(expected)


def test_metrics_named_like_a_field_are_kept_apart(tmp_path: Path) -> None:
    logs = {"event": 1, "timing": 2}
    MetricsLogCallback(tmp_path).on_log(None, TrainerState(), TrainerControl(), logs=logs)
    row = without_timing(tmp_path)[0]
    assert row == {"event": "log", "step": 0, "epoch": 0.0, "metric.event": 1, "metric.timing": 2}


@pytest.mark.parametrize(
    "name", ["eval_runtime", "train_samples_per_second", "step_time", "mfu", "gpu_memory"]
)
def test_what_depends_on_the_machine(name: str) -> None:
    assert is_timing(name)


@pytest.mark.parametrize(
    "name", ["loss", "eval_accuracy", "grad_norm", "total_flos", "num_input_tokens_seen"]
)
def test_what_does_not(name: str) -> None:
    assert not is_timing(name)


# --- damage -------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_and_dropped_on_resume(tmp_path: Path) -> None:
    train(tmp_path, 4, end=False)
    path = tmp_path / "metrics.jsonl"
    whole = without_timing(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    assert without_timing(tmp_path) == whole[:-1]
    train(tmp_path, 4, start=3)
    assert without_timing(tmp_path)[:-1] == whole


def test_a_torn_last_line_is_dropped_by_an_evaluation_alone(tmp_path: Path, log_lines: Any) -> None:
    train(tmp_path, 1, end=False)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "lo')
    state = TrainerState(global_step=1)
    MetricsLogCallback(tmp_path).on_evaluate(None, state, TrainerControl(), metrics={"eval_loss": 1.0})
    assert [row["event"] for row in without_timing(tmp_path)] == ["log", "evaluate"]
    assert "unfinished line" in log_lines.text


@pytest.mark.parametrize("bad", ["{broken", "[1]"])
def test_a_broken_line_is_named(tmp_path: Path, bad: str) -> None:
    (tmp_path / "m.jsonl").write_text(f'{{"a": 1}}\n{bad}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2: not a JSON object"):
        read_metrics(tmp_path / "m.jsonl")


def test_resuming_on_a_damaged_file_sets_it_aside(tmp_path: Path, log_lines: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text("{broken\n")
    train(tmp_path, 3, start=2)
    assert "damaged" in log_lines.text
    assert (tmp_path / "metrics-1.jsonl").read_text() == "{broken\n"
    assert [row["step"] for row in without_timing(tmp_path)] == [3, 3]


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    train(tmp_path, 3, start=2)
    assert [row["step"] for row in without_timing(tmp_path)] == [3, 3]


def test_a_resumed_run_names_the_rows_that_were_lost(tmp_path: Path, log_lines: Any) -> None:
    train(tmp_path, 6, end=False)
    history = [{"loss": 1 / step, "step": step} for step in range(1, 6)]
    state = TrainerState(global_step=5, log_history=[*history, {"note": "of a script"}])
    MetricsLogCallback(tmp_path).on_train_begin(None, state, TrainerControl())
    assert "lacks the rows" not in log_lines.text
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if json.loads(line)["step"] in (1, 5))
    )
    MetricsLogCallback(tmp_path).on_train_begin(None, state, TrainerControl())
    assert "metrics.jsonl lacks the rows of steps that this run has logged (2, 3, 4)" in log_lines.text


def test_a_file_that_cannot_be_cut_back_when_a_run_resumes_is_cut_back_later(
    tmp_path: Path, log_lines: Any
) -> None:
    """As on a full disk: the run starts, and the file never has the rows of both sessions."""
    train(tmp_path, 6, end=False)
    obstacle = tmp_path / "metrics.jsonl.tmp"
    obstacle.mkdir()
    callback, state = MetricsLogCallback(tmp_path), TrainerState(global_step=4, max_steps=8)
    callback.on_train_begin(None, state, TrainerControl())
    state.global_step = 5
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.5})
    assert "removed before the next row" in log_lines.text
    obstacle.rmdir()
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.25})
    logged = [(row["step"], row["loss"]) for row in without_timing(tmp_path) if row["event"] == "log"]
    assert logged == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.5), (5, 0.25)]


def test_rows_that_an_earlier_session_could_not_write_are_not_in_the_file_twice(tmp_path: Path) -> None:
    """A script calls `train()` again, in the same process, after a disk was full."""
    callback = train(tmp_path, 4, end=False)
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"
    path.rename(aside)
    path.mkdir()
    state = TrainerState(global_step=5, max_steps=8)
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.2})
    path.rmdir()
    aside.rename(path)
    callback.on_train_begin(None, TrainerState(global_step=4, max_steps=8), TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs={"loss": 0.2})
    assert [row["step"] for row in without_timing(tmp_path) if row["event"] == "log"] == [1, 2, 3, 4, 5]


FULL_DISK = """
import resource, signal, sys
from windlass.callbacks.metrics_log import MetricsLogCallback, read_metrics
from windlass.core.events import TrainerControl, TrainerState

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
callback, state = MetricsLogCallback(sys.argv[1]), TrainerState()
callback.on_train_begin(None, state, TrainerControl())
callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
size = callback.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
callback.on_log(None, state, TrainerControl(), logs={"loss": 2.0})
callback.on_train_end(None, state, TrainerControl())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
callback.on_log(None, state, TrainerControl(), logs={"loss": 3.0})
print([row["loss"] for row in read_metrics(callback.path)])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
def test_a_full_disk_delays_rows_and_costs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "[1.0, 2.0, 3.0]\n"
    assert "could not be written; training continues" in done.stderr
    assert (
        "lacks the rows of steps that could not be written (0); log_history has their metrics" in done.stderr
    )
