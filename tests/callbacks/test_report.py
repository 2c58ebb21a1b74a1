"""The report on disk."""

from __future__ import annotations

import dataclasses
import enum
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.callbacks.report import ReportCallback, changed_arguments, environment
from windlass.core.events import TrainerControl, TrainerState


class Strategy(enum.Enum):
    NO = "no"
    STEPS = "steps"


@dataclasses.dataclass
class Arguments:
    output_dir: str
    learning_rate: float = 5e-5
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    eval_strategy: Strategy = Strategy.NO
    hub_token: str | None = None
    include_num_input_tokens_seen: str = "no"
    _cache: int = 0


def finished(**changes: Any) -> TrainerState:
    history = [{"loss": 2.0, "learning_rate": 1e-4, "epoch": 1.0, "step": 5}, {"eval_loss": 1.5, "step": 5}]
    return TrainerState(**{"global_step": 5, "max_steps": 5, "log_history": history, **changes})


def test_a_page_at_each_save_and_a_picture_at_the_end(tmp_path: Path) -> None:
    callback = ReportCallback(tmp_path / "run-1")
    callback.on_save(Arguments("x"), finished(max_steps=10), TrainerControl())
    page = tmp_path / "run-1" / "report.html"
    assert "running, step 5 of 10" in page.read_text()
    assert "<h1>run-1</h1>" in page.read_text()
    callback.on_train_end(Arguments("x"), finished(), TrainerControl())
    assert "finished after 5 steps" in page.read_text()
    names = {path.name for path in page.parent.iterdir()}
    assert names <= {"report.html", "training.png"}  # nothing half-written is left


def test_a_run_that_stopped_early_says_so(tmp_path: Path) -> None:
    ReportCallback(tmp_path).on_train_end(Arguments("x"), finished(max_steps=10), TrainerControl())
    assert "stopped at step 5 of 10" in (tmp_path / "report.html").read_text()


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from windlass.callbacks.picture import draw_training

    for history in (finished().log_history, [], [{"loss": float("nan"), "step": 1}]):
        path = tmp_path / f"{len(history)}.png"
        draw_training(history, path, "a run")
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1080, 720)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".png"] * 3


def test_matplotlib_is_left_alone_where_its_state_is_global() -> None:
    source = (Path(sys.modules["windlass.callbacks.report"].__file__ or "").parent / "picture.py").read_text()
    assert "import pyplot" not in source
    assert "matplotlib.use" not in source


def test_without_matplotlib_a_line_says_how_to_get_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ReportCallback(tmp_path).on_train_end(Arguments("x"), finished(), TrainerControl())
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "training.png").exists()
    assert 'pip install "windlass[report]"' in log_lines.text


def test_facts_may_be_given_or_asked_for_when_the_page_is_written(tmp_path: Path) -> None:
    events: list[str] = []
    callback = ReportCallback(tmp_path, lambda: {"title": "asked", "events": events})
    callback.on_save(Arguments("x"), finished(), TrainerControl())
    events.append("update 3 skipped")
    callback.on_save(Arguments("x"), finished(), TrainerControl())
    page = (tmp_path / "report.html").read_text()
    assert "update 3 skipped" in page
    assert "<h1>asked</h1>" in page
    assert "python" in page  # what was not given is found out


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    state = finished(is_world_process_zero=False)
    ReportCallback(tmp_path / "x").on_train_end(Arguments("x"), state, TrainerControl())
    assert not (tmp_path / "x").exists()


def test_a_report_that_fails_never_stops_training(tmp_path: Path, log_lines: Any) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    ReportCallback(tmp_path / "taken").on_save(Arguments("x"), finished(), TrainerControl())
    assert "could not be written" in log_lines.text

    def broken() -> dict[str, Any]:
        raise RuntimeError("no facts today")

    ReportCallback(tmp_path, broken).on_save(Arguments("x"), finished(), TrainerControl())
    assert "no facts today" in log_lines.text


def test_changed_arguments_without_secrets() -> None:
    args = Arguments("out", betas=[0.9, 0.95], eval_strategy=Strategy.STEPS, hub_token="hidden", _cache=3)
    args.include_num_input_tokens_seen = "all"
    assert changed_arguments(args) == {
        "output_dir": "out",
        "eval_strategy": "steps",
        "include_num_input_tokens_seen": "all",
    }
    assert changed_arguments(object()) == {}


def test_the_command_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train.py", "--hub_token", "abc", "--api_key=def", "hub_token=ghi", "--seed", "3", "tokens=4"]
    monkeypatch.setattr(sys, "argv", command)
    assert (
        environment()["command"] == "train.py --hub_token *** --api_key=*** hub_token=*** --seed 3 tokens=4"
    )
