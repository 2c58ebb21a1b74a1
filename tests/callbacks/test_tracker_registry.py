"""Which trackers a name selects, and what is asked of trackers that users bring."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.callbacks import tracker_registry
from windlass.callbacks.tracker import GeneralTracker, on_main_process
from windlass.callbacks.tracker_registry import (
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    trackers_of_run,
)
from windlass.core.errors import ConfigError
from windlass.dist.beacon import beacon


class Notes(GeneralTracker):
    """A tracker as guides write them."""

    name = "notes"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str = "run") -> None:
        super().__init__()
        self.run_name = run_name
        self.kept: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.kept

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.kept.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.kept.append((step, values))


class Waited(GeneralTracker):
    """Keeps what the watchdog would say of each call, and whether it would end it some day."""

    name = "silent"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Any] = []

    def _wait(self, *_: Any, **__: Any) -> None:
        self.waits.append((beacon().mark().call, bool(beacon().limited)))

    start = store_init_configuration = log = finish = _wait


# The calls of a run that is opened, described, gets values once, and ends
WAITS_OF_A_RUN = [("report to silent", limited) for limited in (True, True, True, False)]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[GeneralTracker]]:
    """The registry, put back after the test."""
    known = dict(tracker_registry.LOGGER_TYPE_TO_CLASS)
    monkeypatch.setattr(tracker_registry, "LOGGER_TYPE_TO_CLASS", known)
    return known


def test_all_means_those_that_are_installed_beside_those_that_are_given() -> None:
    mine = Notes()
    assert filter_trackers(["all", mine], "logs") == [*get_available_trackers(), mine]


def test_mlflow_is_left_out_where_the_variable_of_transformers_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow")
    assert "mlflow" in get_available_trackers()
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "true")
    assert "mlflow" not in get_available_trackers()
    with pytest.raises(ConfigError, match="log_with='mlflow': is switched off by DISABLE_MLFLOW_INTEGRATION"):
        filter_trackers(["mlflow"])


def test_each_once_and_members_of_an_enum_by_value() -> None:
    pytest.importorskip("tensorboard")
    from accelerate.utils import LoggerType

    wanted = ["tensorboard", LoggerType.TENSORBOARD, "tensorboard"]
    assert filter_trackers(wanted, "logs") == ["tensorboard"]
    assert filter_trackers("tensorboard", "logs") == ["tensorboard"]
    assert filter_trackers(None) == []


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        filter_trackers(["wandbb", "tensorboard", "notes"])
    assert [problem.value for problem in error.value.problems] == ["wandbb", "tensorboard", "notes"]
    assert "wandb" in error.value.problems[0].fix
    assert "project_dir" in error.value.problems[1].fix


def test_variables_that_ask_for_uploads_are_refused_where_the_tracker_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    monkeypatch.setenv("WANDB_WATCH", "False")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    assert trackers_of_run(["tensorboard"]) == ["tensorboard"]
    with pytest.raises(
        ConfigError, match="WANDB_LOG_MODEL='checkpoint': is not read; unset it, and keep weights"
    ) as caught:
        trackers_of_run(["tensorboard", "wandb"])
    assert len(caught.value.problems) == 1
    assert filter_trackers("wandb") == ["wandb"], "as accelerate, which reads none of them"


def test_a_class_of_ones_own_goes_by_its_name(registered: dict[str, type[GeneralTracker]]) -> None:
    register_tracker_class(Notes)
    assert registered["notes"] is Notes
    assert filter_trackers("notes") == ["notes"]


@pytest.mark.parametrize(
    "cls", [dict, "notes", type("Nameless", (GeneralTracker,), {"requires_logging_directory": True})]
)
def test_what_is_no_tracker_class_is_refused(cls: Any) -> None:
    with pytest.raises(ConfigError):
        register_tracker_class(cls)


def test_taking_a_built_in_ones_place_is_said(
    registered: dict[str, type[GeneralTracker]],
) -> None:
    with pytest.warns(UserWarning, match="Mine replaces WandBTracker"):
        register_tracker_class(type("Mine", (Notes,), {"name": "wandb"}))


def test_a_tracker_that_lacks_something_names_it() -> None:
    class Bare(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(ConfigError) as error:
        Bare()
    assert [problem.field for problem in error.value.problems] == ["Bare.name", "Bare.tracker"]
    GeneralTracker(_blank=True)


def test_other_processes_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Notes()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tracker.log({"loss": 1.0}, step=1)
    assert tracker.kept == []
    monkeypatch.setattr(Notes, "main_process_only", False)
    tracker.log({"loss": 1.0}, step=1)
    assert tracker.kept == [(1, {"loss": 1.0})]
