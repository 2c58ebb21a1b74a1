from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.small import Net, rows

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.core.threads import LoadWatch


@pytest.mark.parametrize(
    ("load", "own", "training", "warns"),
    [
        (0.3, 2, False, False),
        (2.4, 2, False, False),  # less than one program more than the cores carry
        (14.0, 2, False, True),
        (2.9, 2, True, False),
        (6.2, 6, True, False),  # the job's own data workers
        (8.1, 6, True, True),
    ],
)
def test_a_load_of_other_programs_is_logged_once(
    load: float, own: int, training: bool, warns: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, windlass_logs: None,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    caplog.set_level(logging.INFO, "windlass")
    watch = LoadWatch(own)
    watch.look(training=training)
    watch.look(training=training)
    lines = [record.getMessage() for record in caplog.records if "load average" in record.getMessage()]
    assert len(lines) == int(warns)
    assert not warns or lines[0].startswith(f"load average {load:.1f} on 2 core(s)")


def test_a_load_that_the_system_does_not_show_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", unknown)
    watch = LoadWatch(1)
    watch.look(training=False)
    watch.look(training=True)


@pytest.fixture
def windlass_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package logs reaches pytest's handler."""
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)


@pytest.fixture
def other_threads() -> Iterator[int]:
    """A number of threads that this process does not have; its own comes back afterwards."""
    before = torch.get_num_threads()
    yield before + 1
    torch.set_num_threads(before)


def test_a_run_resumed_with_other_threads_warns(
    tmp_path: Path, other_threads: int, caplog: pytest.LogCaptureFixture, windlass_logs: None
) -> None:
    def train(steps: int, resume: bool) -> None:
        args = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
        )
        Trainer(Net(), args, train_dataset=rows(32)).train(resume_from_checkpoint=resume)

    train(2, resume=False)
    train(4, resume=True)
    assert "thread(s) per process" not in caplog.text
    torch.set_num_threads(other_threads)
    train(6, resume=True)
    assert f"thread(s) per process, this process has {other_threads}" in caplog.text


def test_a_loop_resumed_with_other_threads_warns(
    tmp_path: Path, other_threads: int, caplog: pytest.LogCaptureFixture, windlass_logs: None
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    torch.set_num_threads(other_threads)
    accelerator.load_state(tmp_path / "state")
    assert f"thread(s) per process, this process has {other_threads}" in caplog.text
