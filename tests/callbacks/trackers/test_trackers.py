"""Every built-in tracker, run for real without a network, and read back."""

from __future__ import annotations

import csv
import enum
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.callbacks.tracker_readers import PACKAGES, READERS, Curves, each_installed, offline
from tests.dist.launch import run_script
from tests.versions import with_pinned

from windlass.callbacks.metrics_log import read_metrics
from windlass.callbacks.rows import Row
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS, get_available_trackers
from windlass.callbacks.trackers.tensorboard import TensorBoardTracker
from windlass.callbacks.tracking import sent_values
from windlass.core.errors import ConfigError
from windlass.core.optional import is_available

HERE = Path(__file__).resolve().parents[1]
# What a tracker cannot draw, and what its file format rounds.
NO_NAN = {"clearml", "neptune"}
NO_SIGNS = {"mlflow", "azure_ml", "dagshub"}  # in the name of a metric
FLOAT32 = {"tensorboard"}
# Without a connection ClearML begins a run again; the others continue the one of the checkpoint.
ANEW = {"clearml"}
NO_IDENTITY = {"neptune"}  # of a run that was recorded without a connection


def run_in(folder: Path, name: str) -> dict[str, Any]:
    """Train, resume and log by hand in a process of its own; what it says of its runs."""
    (folder / "home").mkdir()
    said = run_script(HERE / "tracker_runs.py", name, cwd=folder, timeout=240, environ=offline(folder))
    line = next(line for line in reversed(said.splitlines()) if line.startswith('{"first"'))
    answer: dict[str, Any] = json.loads(line)
    return answer


def expected(rows: list[Row]) -> Curves:
    """The curves of a metrics.jsonl, and those that the loop logs by hand."""
    found: Curves = {"own/loss": {1: 0.1, 2: 0.3}, "own_eval": {1: 3.0}}
    for row in rows:
        for name, value in sent_values(row).items():
            found.setdefault(name, {})[row["step"]] = value
    return found


def is_same(name: str, kept: float, measured: float) -> bool:
    if math.isnan(measured):
        return math.isnan(kept)
    return kept == (float(np.float32(measured)) if name in FLOAT32 else measured)


@pytest.mark.parametrize("name", list(each_installed()))
def test_trackers_keep_what_metrics_jsonl_holds(name: str, tmp_path: Path) -> None:
    identities = run_in(tmp_path, name)
    assert (identities["first"] is None) is (name in NO_IDENTITY)
    assert (identities["first"] == identities["resumed"]) is (name not in ANEW)
    curves = READERS[name](tmp_path)
    wanted = expected(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert math.isnan(wanted["unlucky"][3])
    assert (wanted["exact"], wanted.pop("odd")) == ({3: 0.5}, {3: "1j"})
    assert wanted.pop("mixed") == {3: {"a": [1, None], "b": "b''"}}, "no curve, and no row is lost for it"
    assert wanted["recall@5"] == {3: 0.25}
    if name in NO_SIGNS:
        assert "recall@5" not in curves
        del wanted["recall@5"]
    if name in NO_NAN:
        assert "unlucky" not in curves
        del wanted["unlucky"]
    for metric, points in wanted.items():
        kept = curves.get(metric, {})
        differing = {
            step: (kept.get(step), v)
            for step, v in points.items()
            if not is_same(name, kept.get(step, 0.5), v)
        }
        assert not differing, (metric, differing)


class Mode(enum.StrEnum):
    FAST = "fast"


def test_settings_of_numpy_and_enums_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    given = {"lr": np.float64(0.1), "rows": np.int64(3), "mode": Mode.FAST, "sizes": [1, 2]}
    tracker.store_init_configuration(given)
    tracker.finish()
    written = yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text())
    assert written == {"lr": 0.1, "rows": 3, "mode": "fast", "sizes": "[1, 2]"}


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_run_of_the_script_stays_open(name: str, tmp_path: Path) -> None:
    """Also when a second training starts, which ends the runs that an earlier one has opened."""
    pytest.importorskip(name)
    (tmp_path / "home").mkdir()
    said = run_script(HERE / "script_runs.py", name, cwd=tmp_path, timeout=240, environ=offline(tmp_path))
    identities = json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("[")))
    assert len(identities) == 4
    assert identities[0] is not None
    assert set(identities) == {identities[0]}


@with_pinned("accelerate")
def test_names_and_classes_are_those_that_scripts_know() -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    theirs = tracking.LOGGER_TYPE_TO_CLASS
    assert set(LOGGER_TYPE_TO_CLASS) - set(theirs) == {"azure_ml", "codecarbon", "dagshub", "neptune"}
    for name, cls in ((name, LOGGER_TYPE_TO_CLASS[name]) for name in theirs):
        assert cls.__name__ == theirs[name].__name__
        assert cls.requires_logging_directory == theirs[name].requires_logging_directory
        public = {m for m in vars(theirs[name]) if not m.startswith("_")} - {"main_process_only"}
        assert public <= set(dir(cls)), (name, public - set(dir(cls)))
        for method in [m for m in public | {"__init__"} if callable(getattr(theirs[name], m))]:
            ours, known = (inspect.signature(getattr(c, method)) for c in (cls, theirs[name]))
            assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
                (p.name, p.kind, p.default) for p in known.parameters.values()
            ], (name, method)


@pytest.mark.parametrize("name", sorted(READERS))
def test_what_is_not_installed_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.callbacks.tracker_registry import filter_trackers
    from windlass.core.errors import MissingDependencyError

    if name in ("azure_ml", "dagshub"):
        pytest.importorskip("mlflow", reason="which they are asked for first")
    package = PACKAGES.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(
        MissingDependencyError, match=f"pip install {name.replace('azure_ml', 'azureml-mlflow')}"
    ):
        filter_trackers(name, "logs")


@pytest.mark.skipif(not is_available("codecarbon"), reason="codecarbon is not installed")
def test_the_energy_of_each_session_is_measured(tmp_path: Path) -> None:
    run_in(tmp_path, "codecarbon")
    with open(tmp_path / "out" / "emissions.csv") as file:
        found = list(csv.DictReader(file))
    assert [row["project_name"] for row in found] == ["tests", "tests"], "of the run, and of the resumed one"
    assert all(float(row["energy_consumed"]) > 0 for row in found)


@pytest.mark.parametrize(
    ("name", "address"), [("azure_ml", "azureml://"), ("dagshub", "https://dagshub.com/")]
)
def test_a_service_of_mlflow_needs_its_address(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker: Any = LOGGER_TYPE_TO_CLASS[name]
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI=None: set it to .*{address}"):
        tracker("tests").start()
    assert name not in get_available_trackers(), "MLflow has the run already"
