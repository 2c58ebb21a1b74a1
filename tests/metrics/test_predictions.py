from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from windlass.config.plan import OptimizerPlan, PrecisionPlan
from windlass.core.mesh import Mesh
from windlass.metrics.predictions import (
    Errors,
    add_measured,
    are_any,
    errors_of,
    find_prediction,
    key_of,
    write_prediction,
)


@pytest.mark.parametrize("home", ["~a-user-without-a-home", "/" + "x" * 300])
def test_a_run_of_a_user_who_cannot_enter_a_home_looks_for_no_prediction(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", home)
    assert not are_any()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    return tmp_path / "plans"


KEY, OTHER = "a" * 64, "a" * 32 + "b" * 32


def test_runs_are_kept_with_the_prediction_that_they_tested(home: Path) -> None:
    assert not are_any()
    add_measured(KEY, 100, "2026-01-01")  # nothing was predicted
    assert not home.exists()
    write_prediction(KEY, "llama", 110)
    assert are_any()
    for measured in range(100, 125):
        add_measured(KEY, measured, "2026-01-01")
    write_prediction(KEY, "llama", 110)
    found = find_prediction(KEY)
    assert found is not None
    assert [run["measured"] for run in found["runs"]] == [*range(105, 125)], "the last 20"
    write_prediction(KEY, "llama", 120)
    found = find_prediction(KEY)
    assert found is not None
    assert (found["predicted"], found["runs"]) == (120, [])


def test_a_file_of_another_key_is_no_prediction(home: Path) -> None:
    write_prediction(KEY, "llama", 110)
    assert find_prediction(OTHER) is None, "files are named by the first half of a key"


def test_errors_are_shares_of_what_runs_of_the_family_took(home: Path) -> None:
    assert errors_of("llama") is None
    for key, family, predicted, measured in (
        ("b" * 64, "llama", 110, 100), ("c" * 64, "llama", 90, 120), ("d" * 64, "bert", 500, 100)
    ):  # fmt: skip
        write_prediction(key, family, predicted)
        add_measured(key, measured, "2026-01-01")
    (home / "damaged.json").write_text("{")
    assert errors_of("llama") == Errors(2, 90 / 120 - 1, 110 / 100 - 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "another"},
        {"predicted": True},
        {"predicted": 0},
        {"family": 3},
        {"runs": [{"measured": 0}]},
        {"runs": [1]},
    ],
)
def test_a_record_that_is_malformed_is_none(changes: dict[str, Any], home: Path) -> None:
    write_prediction(KEY, "llama", 110)
    (file,) = home.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert find_prediction(KEY) is None
    assert errors_of("llama") is None


def test_the_key_is_that_of_model_plan_batch_and_what_is_averaged() -> None:
    def key(model: nn.Module, rows: int = 2, averages: bool = False, **plan: Any) -> str:
        parts: Any = {"optimizer": OptimizerPlan(), "precision": PrecisionPlan(), **plan}
        others = dict.fromkeys(("batch", "dist", "transforms", "stability"))
        run: Any = SimpleNamespace(**others, **parts)
        return key_of(model, run, Mesh(), {"x": torch.zeros(rows, 4)}, averages=averages, on_device=False)

    whole, frozen = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    assert key(whole) == key(nn.Linear(4, 2)), "values do not count"
    keys = [
        key(whole), key(nn.Linear(4, 3)), key(frozen), key(nn.Linear(4, 2).double()), key(whole, 3),
        key(whole, averages=True), key(whole, optimizer=OptimizerPlan("sgd")),
        key(whole, optimizer=OptimizerPlan(options={"momentum": 0.9})),
        key(whole, precision=PrecisionPlan(compute="bf16")),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(whole, optimizer=OptimizerPlan(learning_rate=1.0)) == key(whole)
