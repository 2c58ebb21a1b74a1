from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass import TrainerControl, TrainerState, TrainingArguments
from windlass.dist.gang import current
from windlass.search.search import ChosenTrial, Search, TrialWatch
from windlass.search.search_settings import SearchSettings
from windlass.search.study import FILE_NAME

pytest.importorskip("optuna")

from optuna import pruners, samplers


def own_options(name: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "RandomSampler": lambda: samplers.RandomSampler(seed=1),
        "TPESampler": lambda: samplers.TPESampler(seed=1, multivariate=True, n_startup_trials=2),
        "without a seed": samplers.RandomSampler,
        "GridSampler": lambda: samplers.GridSampler({"exponent": [-3, -2, -1], "size": [1, 2]}),
        "HyperbandPruner": lambda: pruners.HyperbandPruner(min_resource=1, max_resource=4),
        "SuccessiveHalvingPruner": lambda: pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=2
        ),
    }
    return {"pruner" if "Pruner" in name else "sampler": made[name]()}


def searched(folder: Path, count: int, name: str) -> list[dict[str, Any]]:
    """The trials of a search whose losses are a formula; its space returns other names than it suggests."""

    def space(trial: Any) -> dict[str, Any]:
        size = trial.suggest_categorical("size", [1, 2])
        return {"rate": 10 ** trial.suggest_int("exponent", -8, -1), "size": 2 * size}

    def run_trial(trial: ChosenTrial, watch: TrialWatch) -> dict[str, float]:
        state, control = TrainerState(), TrainerControl()
        args = TrainingArguments(str(folder))
        while state.global_step < 4 and not control.should_training_stop:
            state.global_step += 1
            loss = trial.params["rate"] * trial.params["size"] / state.global_step
            watch.on_evaluate(args, state, control, metrics={"eval_loss": loss})
            watch.on_step_begin(args, state, control)
        return {"eval_loss": loss}

    settings = SearchSettings(space, None, count, backend="optuna", options=own_options(name))
    Search(settings, str(folder), current(), {}).run(run_trial)
    return list[dict[str, Any]](json.loads((folder / FILE_NAME).read_text())["trials"])


@pytest.mark.parametrize(
    "name",
    [
        "RandomSampler",
        "TPESampler",
        "without a seed",
        "GridSampler",
        "HyperbandPruner",
        "SuccessiveHalvingPruner",
    ],
)
def test_a_search_by_objects_of_optuna_continues_as_it_was(name: str, tmp_path: Path) -> None:
    first = searched(tmp_path / "ended", 4, name)
    again = searched(tmp_path / "ended", 9, name)
    assert again[:4] == first
    whole = searched(tmp_path / "whole", 9, name)
    assert len(again) == len(whole) == (6 if name == "GridSampler" else 9)
    if name != "without a seed":
        assert again == whole
    if "Pruner" in name:
        assert {trial["state"] for trial in again} == {"complete", "pruned"}
