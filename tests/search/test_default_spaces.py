from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import trainer_utils as reference

from windlass.core.errors import MissingDependencyError
from windlass.core.optional import is_available
from windlass.search import default_spaces as ours


@pytest.mark.parametrize(
    "metrics",
    [
        {"eval_loss": 0.5, "epoch": 1.0, "eval_runtime": 3.0, "eval_samples_per_second": 4.0},
        {"eval_loss": 0.5, "eval_accuracy": 0.25, "eval_f1": 0.5, "epoch": 1.0},
        {"epoch": 2.0},
    ],
)
def test_the_objective_is_that_of_the_reference(metrics: dict[str, float]) -> None:
    before = dict(metrics)
    assert ours.default_compute_objective(metrics) == reference.default_compute_objective(metrics)
    assert metrics == before


def test_the_memory_of_an_evaluation_is_no_objective() -> None:
    memory = {
        "eval_peak_memory_process_gib": 3.5, "eval_peak_memory_device_gib": 9.0, "eval_mem_cpu_alloc_delta": 4096,
        "init_mem_gpu_peaked_delta": 5.0, "before_init_mem_cpu": 6.0,
    }  # fmt: skip
    assert ours.default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, **memory}) == 0.25
    assert ours.default_compute_objective({"eval_loss": 0.5, **memory}) == 0.5


def test_the_tokens_trained_on_are_no_objective() -> None:
    evaluated = {"eval_loss": 0.5, "eval_mean_token_accuracy": 0.25, "eval_num_tokens": 4096.0}
    assert ours.default_compute_objective(evaluated) == 0.25
    of_two_sets = {
        "eval_a_loss": 0.5,
        "eval_a_num_tokens": 4096.0,
        "eval_b_loss": 0.25,
        "eval_b_num_tokens": 4096.0,
    }
    assert ours.default_compute_objective(of_two_sets) == 0.75


def test_backends_and_results_have_the_same_words() -> None:
    assert [m.value for m in ours.HPSearchBackend] == [m.value for m in reference.HPSearchBackend]
    assert ours.BestRun._fields == reference.BestRun._fields
    assert ours.BestRun("3", 0.5, {}).run_summary is None


class _Trial:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.asked.append((name, args, kwargs)) or args[0]


def test_the_spaces_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are not installed; modules without anything replace them."""
    tune: Any = ModuleType("ray.tune")
    for word in ("loguniform", "choice", "uniform"):
        setattr(tune, word, lambda *args, word=word: (word, *args))
    for name, module in {
        "optuna": ModuleType("optuna"),
        "wandb": ModuleType("wandb"),
        "ray": ModuleType("ray"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ray.tune", tune)
    monkeypatch.setattr(sys.modules["ray"], "tune", tune, raising=False)
    from transformers import integrations

    for question in ("is_optuna_available", "is_ray_tune_available", "is_wandb_available"):
        monkeypatch.setattr(integrations, question, lambda: True, raising=False)
    mine, theirs = _Trial(), _Trial()
    assert ours.default_hp_space_optuna(mine) == reference.default_hp_space_optuna(theirs)
    assert mine.asked == theirs.asked
    assert ours.default_hp_space_ray(None) == reference.default_hp_space_ray(None)
    assert ours.default_hp_space_wandb(None) == reference.default_hp_space_wandb(None)
    assert ours.hp_params(SimpleNamespace(params={"seed": 1})) == {"seed": 1}


def test_settings_of_a_trial() -> None:
    assert ours.hp_params({"seed": 3}) == {"seed": 3}
    with pytest.raises(RuntimeError, match="int is not a trial"):
        ours.hp_params(3)


def test_a_missing_package_is_named() -> None:
    if is_available("ray"):
        pytest.skip("it is installed")
    with pytest.raises(MissingDependencyError, match="ray is needed to search over hyperparameters"):
        ours.default_hp_space_ray()
