"""The profiler around a part of a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.accelerator.profiling import profile
from windlass.config.loop_options import ProfileKwargs
from windlass.core.errors import ConfigError


def work() -> None:
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def test_operations_are_recorded_and_written(tmp_path: Path) -> None:
    settings = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path / "new"))
    with profile(settings, rank=3) as profiler:
        work()
    names = {event.key for event in profiler.key_averages()}
    assert "aten::mm" in names
    trace = json.loads((tmp_path / "new" / "profile_3.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_a_schedule_records_its_active_steps(tmp_path: Path) -> None:
    ready: list[Any] = []
    settings = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2}, on_trace_ready=ready.append
    )
    with profile(settings) as profiler:
        for _ in range(8):
            work()
            profiler.step()
    assert len(ready) == 2
    count = next(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    assert count == 2


def test_a_schedule_that_recorded_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("windlass").addHandler(caplog.handler)
    settings = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with profile(settings):
        work()
    logging.getLogger("windlass").removeHandler(caplog.handler)
    assert "profiler.step() was never called" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (ProfileKwargs(activities=["gpu"]), "activities"),  # type: ignore[list-item]
        (ProfileKwargs(activities=["mtia"]), "activities"),
        (ProfileKwargs(schedule_option={"wiat": 1}), "schedule_option"),
        (ProfileKwargs(schedule_option={"wait": 1}), "schedule_option"),
        (ProfileKwargs(schedule_option={"wait": -1, "warmup": 1, "active": 1}), "schedule_option"),
    ],
)
def test_what_this_machine_cannot_record_is_refused(settings: ProfileKwargs, field: str) -> None:
    with pytest.raises(ConfigError, match=field), profile(settings):
        pass
