from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.dist.launch import end_of, launch
from tests.search.searches import SPACE, Line, rates, trainer_of

from windlass import TrainerCallback
from windlass.callbacks.metrics_log import read_metrics
from windlass.checkpoint import run_lock
from windlass.checkpoint.run_lock import RunLock
from windlass.core.errors import ConfigError, DataError, MissingDependencyError, ModelError
from windlass.core.optional import is_available
from windlass.search.optuna_sampler import OptunaSampler
from windlass.search.search import LOCK_NAME, ChosenTrial, arguments_of, draw_trials
from windlass.search.search_settings import sweep_space
from windlass.search.space import Float
from windlass.search.study import FILE_NAME, Record, Study
from windlass.trainer_utils import BestRun

SCRIPT = Path(__file__).with_name("searches.py")
BACKENDS = [
    "random",
    pytest.param("optuna", marks=pytest.mark.skipif(not is_available("optuna"), reason="needs optuna")),
]


def trials_in(folder: Path) -> list[dict[str, Any]]:
    """The trials of a study, without the speed of their last evaluations."""
    trials = json.loads((folder / FILE_NAME).read_text())["trials"]
    for trial in trials:
        trial["metrics"] = {name: value for name, value in trial["metrics"].items() if name == "eval_loss"}
    return trials


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_search_ends_as_one_that_was_not(backend: str, tmp_path: Path) -> None:
    code, _ = end_of(SCRIPT, tmp_path / "killed", backend, 2)
    assert code == -signal.SIGKILL
    assert [trial["state"] for trial in trials_in(tmp_path / "killed")] == ["complete", "complete", "running"]
    # What kills within the writing of small files leave, of the search and of its trial.
    for left in ("tmp-search.json", "run-2/tmp-run.json", "run-2/tmp-.windlass-failure-1.json"):
        (tmp_path / "killed" / f"{left}-0123456789abcdef").touch()
    code, again = end_of(SCRIPT, tmp_path / "killed", backend, -1)
    assert code == 0, again
    assert not list((tmp_path / "killed").rglob("tmp-*"))
    code, whole = end_of(SCRIPT, tmp_path / "whole", backend, -1)
    assert code == 0, whole
    assert trials_in(tmp_path / "killed") == trials_in(tmp_path / "whole")
    assert again.splitlines()[-1] == whole.splitlines()[-1]
    # Trials that are over are not trained again, and the third continued from its checkpoint.
    sessions = json.loads((tmp_path / "killed" / "run-2" / "run.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert len(json.loads((tmp_path / "killed" / "run-1" / "run.json").read_text())["sessions"]) == 1


@pytest.mark.dist
def test_two_processes_train_each_trial_together(tmp_path: Path) -> None:
    text = launch(2, SCRIPT, tmp_path / "two", "random", -1)
    assert text.count("best BestRun(") == 2
    assert len({line for line in text.splitlines() if line.startswith("best")}) == 1
    assert text.count("trial 0 (run-0)") == 1
    code, _ = end_of(SCRIPT, tmp_path / "one", "random", -1)
    assert code == 0
    one, two = (trials_in(tmp_path / name) for name in ("one", "two"))
    assert [trial["params"] for trial in one] == [trial["params"] for trial in two]


@pytest.mark.dist
def test_two_processes_prune_a_trial_together(tmp_path: Path) -> None:
    launch(2, SCRIPT, tmp_path, "median", -1)
    last = trials_in(tmp_path)[-1]
    assert (last["state"], last["reason"]) == ("pruned", "at update 2")


def test_the_best_and_its_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    before = vars(trainer.args).copy()
    best = trainer.hyperparameter_search(
        SPACE, n_trials=3, backend="random", hp_name=lambda trial: f"t{trial.number}"
    )
    assert isinstance(best, BestRun)
    trials = trials_in(tmp_path)
    assert best.objective == min(trial["values"][0] for trial in trials)
    assert best.run_id == min(trials, key=lambda trial: trial["values"])["name"].removeprefix("t"), (
        "its number, as in transformers"
    )
    assert vars(trainer.args) == before  # a trial changes them for its own time
    for trial in trials:
        metrics = read_metrics(tmp_path / trial["name"] / "metrics.jsonl")
        evaluated = [row for row in metrics if row["event"] == "evaluate"]
        assert trial["values"] == [evaluated[-1]["eval_loss"]]
        assert trial["reports"] == {str(row["step"]): row["eval_loss"] for row in evaluated[:-1]}
        assert (
            max(row["learning_rate"] for row in metrics if "learning_rate" in row)
            <= trial["params"]["learning_rate"]
        )
    assert trainer.state.is_hyper_param_search
    assert trainer.state.trial_params == trials[-1]["params"]
    picture = ElementTree.parse(tmp_path / "search.svg")
    assert len(picture.findall(".//{*}circle")) == 2 * len(trials)


def test_the_picture_has_each_trial_at_its_value_and_objective(tmp_path: Path) -> None:
    study = Study(tmp_path, ["minimize"], "random", {})
    points = [(1.0, 0.5), (2.0, 0.1), (5.0, 0.9)]
    study.trials = [
        Record(number, f"run-{number}", {"lr": value}, "complete", [objective])
        for number, (value, objective) in enumerate(points)
    ]
    circles = ElementTree.fromstring(draw_trials(study) or "").findall("{*}circle")
    # From 30 to 270 across, and the objective from 200 up to 30.
    places = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    assert places == [(30.0, 115.0), (90.0, 200.0), (270.0, 30.0)]
    others, best = {circles[0].attrib["fill"], circles[2].attrib["fill"]}, circles[1].attrib["fill"]
    assert len(others) == 1
    assert best not in others


def test_a_picture_that_cannot_be_written_does_not_fail_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "search.svg").mkdir()
    best = trainer_of(tmp_path).hyperparameter_search({"learning_rate": [0.1]}, n_trials=1, backend="grid")
    assert best.hyperparameters == {"learning_rate": 0.1}
    assert "the picture of the trials was not written" in caplog.text


@pytest.mark.skipif(not is_available("optuna"), reason="needs optuna")
def test_optuna_tells_nothing_of_a_study_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.enable_propagation()
    try:
        OptunaSampler(["minimize"], {}, 1)
    finally:
        optuna.logging.disable_propagation()
    assert "study" not in caplog.text
    assert optuna.logging.get_verbosity() == before


def test_a_grid_ends_with_its_combinations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"learning_rate": [0.1, 0.2], "seed": {"low": 1, "high": 2}}
    trainer_of(tmp_path).hyperparameter_search(space, n_trials=9, backend="grid")
    tried = [tuple(trial["params"].values()) for trial in trials_in(tmp_path)]
    assert tried == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    assert capsys.readouterr().out.count("\n0 ") == 1


def test_a_space_that_branches(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        optim = trial.suggest_categorical("optim", ["adamw_torch", "sgd"])
        decays = [0.0, 0.1] if optim == "sgd" else [0.0]
        return {"optim": optim, "weight_decay": trial.suggest_categorical("weight_decay", decays)}

    trainer_of(tmp_path).hyperparameter_search(space, n_trials=9, backend="grid")
    tried = [tuple(trial["params"].values()) for trial in trials_in(tmp_path)]
    assert tried == [("adamw_torch", 0.0), ("sgd", 0.0), ("sgd", 0.1)]


def test_trials_without_promise_are_pruned(tmp_path: Path) -> None:
    space = {"learning_rate": [0.5, 0.4, 0.3, 0.2, 1e-6]}
    best = trainer_of(tmp_path).hyperparameter_search(space, n_trials=5, backend="grid", pruner="median")
    last = trials_in(tmp_path)[-1]
    assert (last["state"], last["reason"], last["values"]) == ("pruned", "at update 2", [])
    assert best.hyperparameters != {"learning_rate": 1e-6}


@pytest.mark.skipif(not is_available("optuna"), reason="needs optuna")
def test_optuna_prunes_by_the_median_that_is_named(tmp_path: Path) -> None:
    sampler = OptunaSampler(["minimize"], {"pruner": "median"}, seed=0)
    for number in range(5):  # its rule begins after as many trials
        trial = sampler.ask(number, None)
        sampler.report(trial, {2: 0.1}, 2)
        sampler.tell(trial, Record(number, f"trial-{number}", {}, "complete", [0.1]))
    trial = sampler.ask(5, None)
    assert sampler.report(trial, {2: 9.0}, 2)


class Fails(TrainerCallback):
    """Ends the process's part in a trial as a kill would: with what is on disk by then."""

    def __init__(self, trial: str, event: str, step: int) -> None:
        self._trial, self._step = trial, step
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.trial_name, state.global_step) == (self._trial, self._step):
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("event", "step", "every", "evaluated"),
    [
        pytest.param("on_step_begin", 2, 2, 2, id="evaluated and saved, not yet judged"),
        pytest.param("on_step_end", 3, 2, 2, id="judged, not yet ended"),
        pytest.param("on_train_end", 3, 3, 2, id="ended and saved, not yet noted"),
        pytest.param("on_train_end", 2, 2, 1, id="ended, evaluated once more and saved, not yet noted"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_trial_is_pruned_where_one_that_was_not_is(
    event: str, step: int, every: int, evaluated: int, backend: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"pruner": "median"}
    if backend == "optuna":
        from optuna.pruners import MedianPruner

        options = {"pruner": MedianPruner(n_startup_trials=4)}

    def search(folder: Path, *callbacks: Any) -> list[dict[str, Any]]:
        trainer = trainer_of(folder, *callbacks)
        trainer.args.save_steps, trainer.args.eval_steps = every, evaluated
        trainer.hyperparameter_search(rates, n_trials=5, backend=backend, **options)
        return trials_in(folder)

    whole = search(tmp_path / "whole")
    assert whole[-1]["reason"] == f"at update {evaluated}"
    with pytest.raises(RuntimeError, match="killed"):
        search(tmp_path / "killed", Fails("run-4", event, step))
    assert trials_in(tmp_path / "killed")[-1]["state"] == "running"
    assert search(tmp_path / "killed") == whole


def test_a_trial_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    space = {"learning_rate": [1e30, 0.1]}
    best = trainer_of(tmp_path).hyperparameter_search(space, n_trials=2, backend="grid")
    assert [trial["state"] for trial in trials_in(tmp_path)] == ["failed", "complete"]
    assert best.hyperparameters == {"learning_rate": 0.1}


def test_several_objectives(tmp_path: Path) -> None:
    def objectives(metrics: dict[str, float]) -> tuple[float, float]:
        return metrics["eval_loss"], metrics["eval_loss"]

    best = trainer_of(tmp_path).hyperparameter_search(
        {"learning_rate": [0.1, 0.2]}, objectives, 2, ["minimize", "maximize"], "grid"
    )
    assert [len(run.objective) for run in best] == [2, 2]


def test_ctrl_c_ends_the_search_and_keeps_the_trial(tmp_path: Path) -> None:
    class Presses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_name == "run-1" and state.global_step == 3:
                signal.raise_signal(signal.SIGINT)

    trainer_of(tmp_path, Presses()).hyperparameter_search(SPACE, n_trials=3, backend="random")
    assert [trial["state"] for trial in trials_in(tmp_path)] == ["complete", "running"]
    trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=3, backend="random")
    assert [trial["state"] for trial in trials_in(tmp_path)] == ["complete"] * 3


def test_a_model_of_the_trial(tmp_path: Path) -> None:
    seen = []

    def make(trial: Any) -> Line:
        seen.append(None if trial is None else trial.params["width"])
        return Line()

    trainer_of(tmp_path, model_init=make).hyperparameter_search({"width": [3, 4]}, n_trials=2, backend="grid")
    assert seen == [None, 3, 4]


def test_a_changed_space_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=1, backend="random")
    with pytest.raises(ConfigError, match=r"chooses other values for trial 0 than .*search\.json"):
        trainer_of(tmp_path).hyperparameter_search({"learning_rate": [0.3]}, n_trials=2, backend="random")


def test_a_grid_without_the_values_of_a_trial_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path).hyperparameter_search({"learning_rate": [0.1, 0.3]}, n_trials=2, backend="grid")
    with pytest.raises(ConfigError, match=r"0\.3.*has no such values, which trial 1 in .*search\.json has"):
        trainer_of(tmp_path).hyperparameter_search({"learning_rate": [0.1]}, n_trials=2, backend="grid")


def test_another_objective_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=1, backend="random")
    other = {"compute_objective": lambda metrics: -metrics["eval_loss"]}
    with pytest.raises(ConfigError, match=r"compute_objective=.*metrics of trial 0 another objective than"):
        trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=1, backend="random", **other)


class Counting:
    """An objective that depends on the number of its calls."""

    calls = 0

    def __call__(self, metrics: dict[str, float]) -> float:
        self.calls += 1
        return metrics["eval_loss"] + self.calls


def test_an_objective_with_a_state_and_what_else_changed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optuna = pytest.importorskip("optuna", reason="whose samplers are chosen")
    for changes, sampler in ({}, "RandomSampler"), ({"weight_decay": 0.5, "log_level": "info"}, "TPESampler"):
        caplog.clear()
        trainer, objective = trainer_of(tmp_path, **changes), Counting()
        options = {"sampler": getattr(optuna.samplers, sampler)(), "backend": "optuna"}
        given = objective.__call__ if changes else objective
        trainer.hyperparameter_search({"learning_rate": [0.1, 0.2]}, given, 1 + bool(changes), **options)
        assert objective.calls == 3, (
            "two reports and the end of the trial: what is compared is made by a copy"
        )
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "compute_objective keeps a state between its calls" in said
    assert "weight_decay: 0.5 != 0.0 (of the trials so far)" in said
    assert "sampler: 'TPESampler' != 'RandomSampler'" in said
    assert said.count("(of the trials so far)") == 2, said


def test_a_search_with_tuples_is_continued(tmp_path: Path) -> None:
    seen: list[Any] = []

    def make(trial: Any) -> Line:
        seen.append(None if trial is None else trial.params["widths"])
        return Line()

    for trials in (1, 2):
        trainer_of(tmp_path, model_init=make).hyperparameter_search(
            {"widths": [(3, 4), (5, 6)]}, n_trials=trials, backend="grid"
        )
    assert seen == [None, [3, 4], None, [5, 6]]  # the file of the study has no tuples


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "bayes"}, "backend='bayes': must be one of optuna, random, grid"),
        ({"direction": "up"}, "direction='up': must be 'minimize' or 'maximize'"),
        ({"n_trials": 0}, "n_trials=0: must be a whole number, at least 1"),
        ({"n_jobs": 2}, "n_jobs=2: must be 1"),
        (
            {"storage": "sqlite:///x"},
            "storage='sqlite:///x': has no effect: the study is kept in search.json",
        ),
        ({"pruner": "hyperband"}, "pruner='hyperband': must be 'median' or None"),
        ({"pruner": 3}, "pruner=3: must be 'median' or None"),
        (
            {"pruner": "hyperband", "backend": "optuna"},
            "pruner='hyperband': must be 'median' or None, or an object of optuna.pruners",
        ),
        ({"hp_space": None, "backend": "grid"}, "hp_space=None: is needed"),
        ({"hp_space": {"learning_rte": [1]}}, "hp_space.learning_rte=1: is not an argument of this run"),
        ({"hp_space": {"learning_rate": 1}}, "hp_space.learning_rate=1: must be a list of values"),
        ({"hp_space": lambda trial: None}, "hp_space=None: must return the values of a trial, by name"),
        ({"compute_objective": lambda metrics: (1, 2)}, "must return 1 number"),
        ({"compute_objective": lambda metrics: "low"}, "compute_objective='low': must return 1 number"),
        ({"hp_name": lambda trial: "../elsewhere"}, "must return a name for a folder"),
        (
            {"hp_name": lambda trial: "same", "n_trials": 2},
            "hp_name='same': is the name of trial 0 too, and trial 1 needs another folder",
        ),
        (
            {"hp_space": {"learning_rate": [0.1j]}},
            "hp_space.learning_rate=0.1j: cannot be written to the file",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    given = {"hp_space": SPACE, "n_trials": 1, "backend": "random", **arguments}
    with pytest.raises(ConfigError) as caught:
        trainer_of(tmp_path).hyperparameter_search(**given)
    assert words in str(caught.value)


def test_a_model_init_is_needed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.model_init = None
    with pytest.raises(ConfigError, match="each trial begins with a new model"):
        trainer.hyperparameter_search(SPACE)


def test_evaluation_data_is_needed_before_the_first_trial(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.eval_dataset, trainer.args.eval_strategy = None, "no"
    with pytest.raises(ConfigError, match="eval_dataset=None: is needed: trials are compared"):
        trainer.hyperparameter_search(SPACE)
    assert not list(tmp_path.iterdir())


def test_a_search_without_a_complete_trial_has_no_best(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no trial of the search is complete"):
        trainer_of(tmp_path).hyperparameter_search(
            SPACE, n_trials=1, backend="random", compute_objective=lambda metrics: float("nan")
        )
    assert [trial["state"] for trial in trials_in(tmp_path)] == ["failed"]


def test_a_study_is_kept_on_this_machine(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args.output_dir = f"file://{tmp_path}/bucket/search"
    with pytest.raises(ConfigError, match=r"output_dir=.*set it to a folder of this machine"):
        trainer.hyperparameter_search(SPACE)
    (tmp_path / "file").write_text("")
    trainer.args.output_dir = str(tmp_path / "file" / "search")
    with pytest.raises(ConfigError, match=r"output_dir=.*it can't be written \(Not a directory\)"):
        trainer.hyperparameter_search(SPACE)


def test_a_trial_has_its_values_in_the_types_of_their_fields(tmp_path: Path) -> None:
    given = {"warmup_steps": 0.1, "max_steps": 3.0, "seed": 5.8, "learning_rate": 1, "bf16": True}
    args = arguments_of(ChosenTrial(0, "run-0", given), trainer_of(tmp_path).args, False)
    # Whole numbers are cut, as Ray's space of a seed needs; a share of the warm-up is a float, although 0 is none.
    assert [repr(getattr(args, name)) for name in given] == ["0.1", "3", "5", "1.0", "True"]


def test_a_sweep_and_a_space_of_ray_choose_here(tmp_path: Path) -> None:
    sweep = {
        "parameters": {
            "learning_rate": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.1},
            "seed": {"values": [1, 2]},
        }
    }
    trainer_of(tmp_path / "w").hyperparameter_search(lambda trial: sweep, n_trials=2, backend="wandb")
    assert all(0.01 <= trial["params"]["learning_rate"] <= 0.1 for trial in trials_in(tmp_path / "w"))
    domain = SimpleNamespace(sample=lambda random_state: random_state.uniform(1, 9))
    space = {"seed": domain, "learning_rate": {"grid_search": [0.1, 0.2]}, "weight_decay": 0.5}
    trainer_of(tmp_path / "r").hyperparameter_search(lambda trial: space, n_trials=2, backend="ray")
    for trial in trials_in(tmp_path / "r"):
        assert 1 <= trial["params"]["seed"] <= 9
        assert trial["params"]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    "given",
    [
        {"values": "abc"},
        {"values": 3},
        {"values": [1, 2], "probabilities": [0.9, 0.1]},
        {"min": "low", "max": 1},
        {"min": 0.1, "max": 1000, "distribution": "log_uniform"},
        {"min": 0.5, "max": 3.5, "distribution": "int_uniform"},
        {"mu": 0, "sigma": 1, "distribution": "normal"},
        "abc",
    ],
)
def test_what_a_sweep_cannot_choose_from_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"hp_space.parameters.seed.*is not understood"):
        sweep_space({"parameters": {"seed": given}})


def test_ends_of_a_sweep_may_be_words_as_yaml_reads_them() -> None:
    given = {"min": "1e-5", "max": "1e-3", "distribution": "log_uniform_values"}
    assert sweep_space({"learning_rate": given}) == {"learning_rate": Float(1e-5, 1e-3, log=True)}


def test_metrics_of_a_run_are_in_the_folder_that_its_arguments_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "a")
    trainer.train()
    trainer.args.output_dir = str(tmp_path / "b")
    trainer.train()
    for name in "ab":
        assert [
            row["step"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["event"] == "log"
        ] == [2, 4, 6]
    assert not list(tmp_path.glob("a/metrics-*"))


@pytest.mark.skipif(is_available("optuna"), reason="optuna is installed")
def test_without_optuna_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"windlass-trainer\[search\]"):
        trainer_of(tmp_path).hyperparameter_search(SPACE, backend="optuna")


def test_a_damaged_study_ends_the_search_before_a_trial(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        trainer_of(tmp_path).hyperparameter_search(SPACE, backend="random")


def test_one_search_at_a_time_writes_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "GRACE", 0.1)
    with (
        RunLock(tmp_path, LOCK_NAME),
        pytest.raises(
            ConfigError, match=r"output_dir=.*another search is writing to it \(host .*wait for it"
        ),
    ):
        trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=1, backend="random")
    assert not (tmp_path / FILE_NAME).exists()
    trainer_of(tmp_path).hyperparameter_search(SPACE, n_trials=1, backend="random")
    assert not (tmp_path / LOCK_NAME).exists()
