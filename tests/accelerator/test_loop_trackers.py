"""`init_trackers`, `log` and `get_tracker` of a user's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.callbacks.test_tracker_registry import WAITS_OF_A_RUN, Notes, Waited
from tests.callbacks.tracker_readers import READERS

from windlass.accelerator.accelerator import Accelerator
from windlass.callbacks.tracker import GeneralTracker
from windlass.core.errors import ConfigError


def trackers(log_with: Any, folder: Path) -> Accelerator:
    return Accelerator(cpu=True, log_with=log_with, project_dir=folder)


def test_a_tracker_of_ones_own(tmp_path: Path) -> None:
    mine = Notes("run")
    loop = trackers(mine, tmp_path)
    loop.init_trackers("project", config={"lr": 0.1})
    loop.log({"loss": torch.tensor(0.5, dtype=torch.float64), "note": "good"}, step=3)
    assert mine.kept == [{"lr": 0.1}, (3, {"loss": 0.5, "note": "good"})]
    assert loop.get_tracker("notes") is mine
    assert loop.get_tracker("notes", unwrap=True) is mine.kept


def test_keywords_reach_the_tracker_they_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    loop = trackers("tensorboard", tmp_path)
    loop.init_trackers(
        "project", {"lr": 0.1}, init_kwargs={"tensorboard": {"filename_suffix": ".mine"}, "wandb": {}}
    )
    loop.log(
        {"loss": 0.5, "both": {"a": 1.0, "b": 2.0}}, step=3, log_kwargs={"tensorboard": {"walltime": 7.0}}
    )
    assert list((tmp_path / "project").glob("*.mine"))
    loop.end_training()
    assert loop.trackers == []
    curves = READERS["tensorboard"](tmp_path)
    assert curves["loss"] == {3: 0.5}
    assert "lr: 0.1" in (tmp_path / "project" / "hparams.yml").read_text()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    loop = trackers(Notes(), tmp_path)
    assert isinstance(loop.get_tracker("notes"), GeneralTracker)  # blank: nothing was opened
    with pytest.raises(ConfigError, match="wanbd"):
        loop.init_trackers("project", init_kwargs={"wanbd": {"tags": ["a"]}})
    loop.init_trackers("project")
    with pytest.raises(ConfigError, match="known names: notes"):
        loop.get_tracker("wandb")
    with pytest.raises(ConfigError, match="tensorbord"):
        loop.log({"loss": 1.0}, log_kwargs={"tensorbord": {}})
    with pytest.raises(ConfigError, match="step='last': give the number of the update"):
        loop.log({"loss": 1.0}, step="last")  # type: ignore[arg-type]


def test_a_tracker_that_never_answers_is_named_by_the_watchdog(tmp_path: Path) -> None:
    silent = Waited()
    loop = trackers(silent, tmp_path)
    loop.init_trackers("project", config={"lr": 0.1})
    loop.log({"loss": 0.5})
    loop.end_training()
    assert silent.waits == WAITS_OF_A_RUN


class Ending(Notes):
    """Writes down that it was closed; one that is `broken` raises then."""

    broken = False

    def finish(self) -> None:
        self.kept.append("closed")
        if self.broken:
            raise ConnectionError("lost")


class Broken(Ending):
    name = "broken"
    broken = True


def test_all_trackers_are_closed_also_if_one_fails(tmp_path: Path) -> None:
    first, second = Broken(), Ending()
    loop = trackers([first, second], tmp_path)
    loop.init_trackers("project")
    with pytest.raises(ConnectionError, match="lost"):
        loop.end_training()
    assert (first.kept, second.kept) == (["closed"], ["closed"])
    loop.end_training()
    assert second.kept == ["closed"]


def test_runs_that_are_opened_again_replace_those_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    mine = Ending()
    loop = trackers([mine, "tensorboard"], tmp_path)
    for project in ("one", "two"):
        loop.init_trackers(project)
        loop.log({"loss": len(project)}, step=1)
    assert [tracker.name for tracker in loop.trackers] == ["notes", "tensorboard"]
    assert mine.kept == [(1, {"loss": 3})] * 2
    loop.end_training()
    assert mine.kept[2:] == ["closed"]
    assert sorted(path.parent.name for path in tmp_path.rglob("events.out.tfevents*")) == ["one", "two"]
