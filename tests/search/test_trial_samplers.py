from __future__ import annotations

from pathlib import Path

import pytest

from windlass.core.errors import ConfigError
from windlass.search.space import Float
from windlass.search.study import Record, Study
from windlass.search.trial_samplers import GridSampler, MedianRule


def test_a_trial_is_compared_with_complete_trials_that_were_evaluated_at_its_update(tmp_path: Path) -> None:
    study = Study(tmp_path, ["minimize"], "random", {})
    rule = MedianRule(study)

    def add(state: str, reports: dict[int, float]) -> None:
        number = len(study.trials)
        study.trials.append(Record(number, f"run-{number}", {}, state, reports=reports))  # type: ignore[arg-type]

    for value in (0.1, 0.2, 0.4):
        add("complete", {1: value})
    for state in ("pruned", "failed", "running"):
        add(state, {1: 0.0})
    add("complete", {2: 0.0})
    assert not rule.prunes(9.0, 1), "three trials are too few"
    add("complete", {1: 0.6})
    assert not rule.prunes(0.3, 1), "it equals the median"
    assert rule.prunes(0.31, 1)
    assert not rule.prunes(9.0, 3)


def test_a_grid_of_a_number_without_steps_is_refused() -> None:
    trial = GridSampler(None).ask(0, None)
    assert trial is not None
    with pytest.raises(ConfigError, match=r"hp_space\.lr=.*has no step: a grid needs one"):
        trial.suggest("lr", Float(0.1, 0.2))
