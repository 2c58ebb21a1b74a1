"""Every built-in tracker, run for real without a network, and read back."""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.callbacks.tracker_readers import READERS, Curves, each_installed, offline
from tests.dist.launch import run_script

from windlass.callbacks.metrics_log import read_metrics
from windlass.callbacks.rows import Row
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS
from windlass.callbacks.tracking import sent_values

HERE = Path(__file__).resolve().parents[1]
# What a tracker cannot draw, and what its file format rounds.
NO_NAN = {"clearml"}
FLOAT32 = {"tensorboard"}
# Without a connection ClearML begins a run again; the others continue the one of the checkpoint.
ANEW = {"clearml"}


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
    assert identities["first"] is not None
    assert (identities["first"] == identities["resumed"]) is (name not in ANEW)
    curves = READERS[name](tmp_path)
    wanted = expected(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert math.isnan(wanted["unlucky"][3])
    assert (wanted["exact"], wanted.pop("odd")) == ({3: 0.5}, {3: "1j"})
    assert wanted.pop("mixed") == {3: {"a": [1, None], "b": "b''"}}, "no curve, and no row is lost for it"
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


def test_names_and_classes_are_those_that_scripts_know() -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    theirs = tracking.LOGGER_TYPE_TO_CLASS
    assert set(LOGGER_TYPE_TO_CLASS) == set(theirs)
    for name, cls in LOGGER_TYPE_TO_CLASS.items():
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

    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(MissingDependencyError, match=f"pip install {name}"):
        filter_trackers(name, "logs")
